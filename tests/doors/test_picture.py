"""The pictures of the docs are those that the code and the pages give."""

import pytest

from docs.architecture import PAGE, drawn, imports, mermaid, reduced
from docs.drawn import FOLDER, graphs

pytestmark = pytest.mark.unit


def test_the_picture_of_the_packages_is_up_to_date():
    assert PAGE.read_text() == drawn(PAGE.read_text(), mermaid(reduced(imports()))), "run `make architecture`"


def test_every_graph_is_drawn_for_the_site():
    assert {path.name for path in FOLDER.iterdir()} == graphs().keys(), "run `make architecture`"


def test_an_arrow_that_others_imply_is_left_out():
    graph = {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"a"}}
    assert reduced(graph) == {"a": set(), "b": {"a"}, "c": {"b"}, "d": {"a"}}


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="no markers"):
        drawn("# A page\n", "flowchart TD")
