"""Cut a model into stages; each stage's outputs are the inputs of the next.

The forward pass is traced symbolically down to the model's blocks, which are not traced. A stage is a contiguous run of
the traced operations. Every stage keeps the parameter names of the full model.

Source: https://docs.pytorch.org/docs/stable/fx.html
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn

from muster.errors import ConfigError, nearest, one_line
from muster.train.models.frozen import set_mode


class Stages:
    """The `number` stages of a model, in order.

    split: names of the layers at which the second and later stages begin; None: cut evenly by parameter count.
    Raises ConfigError: the model cannot be cut this way.
    """

    def __init__(self, model: nn.Module, *, number: int, split: Sequence[str] | None):
        self.model, self.number = model, number
        graph = _traced(model, inside=split or ())
        self._nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._input, self._output = next(iter(graph.nodes)), next(iter(reversed(graph.nodes)))
        starts = self._named(split) if split else self._even(number)
        bounds = [0, *starts, len(self._nodes)]
        self._parts = [self._nodes[first:end] for first, end in zip(bounds, bounds[1:], strict=False)]
        for stage in range(number):
            if not any(
                p.requires_grad for p in _tensors(model, self.targets(stage)).values() if isinstance(p, nn.Parameter)
            ):
                raise ConfigError(
                    f"stage {stage} of the pipeline has nothing to train: give other layers in strategy.split, or fewer stages"
                )

    def targets(self, stage: int) -> list[str]:
        """Names of the layers and tensors that a stage uses; those that no stage uses belong to the first stage."""
        used = [target for part in self._parts for node in part for target in _used(node)]
        idle = _tensors(self.model, [""]).keys() - _tensors(self.model, used).keys() if stage == 0 else ()
        return list(dict.fromkeys([*(target for node in self._parts[stage] for target in _used(node)), *sorted(idle)]))

    def names(self, stage: int) -> set[str]:
        """Names of the model's state dict entries that a stage holds."""
        return set(_tensors(self.model, self.targets(stage)))

    def stage(self, stage: int) -> nn.Module:
        """Return the stage as a module: inputs cross the cut before it, outputs cross the cut after it."""
        graph, last = fx.Graph(), stage == len(self._parts) - 1
        new = {node: graph.placeholder(node.name) for node in self._crossing(stage)}

        def here(node: fx.Node) -> fx.Node:
            if node not in new:
                assert node.op == "get_attr"  # each stage that uses a parameter holds it; it crosses no cut
                new[node] = graph.node_copy(node)
            return new[node]

        for node in self._parts[stage]:
            new[node] = graph.node_copy(node, here)
        if last:
            graph.node_copy(self._output, here)
        else:
            given = tuple(here(node) for node in self._crossing(stage + 1))
            graph.output(given if len(given) > 1 else given[0])
        return fx.GraphModule(self.model, graph)

    def _crossing(self, stage: int) -> list[fx.Node]:
        """The nodes that are computed before a stage and used in it or after it."""
        if stage == 0:
            return [self._input]
        before = [self._input, *(node for part in self._parts[:stage] for node in part)]
        later = {node for part in self._parts[stage:] for node in part} | {self._output}
        return [node for node in before if later & node.users.keys()]

    def _even(self, number: int) -> list[int]:
        """Indices of the nodes where stages begin, so that the largest stage has the fewest parameters.

        A stage always begins with a layer that has trained parameters of its own. Raises ConfigError if there are
        fewer such layers than stages.
        """
        seen, sizes = set[Any](), dict[int, int]()
        for at, node in enumerate(self._nodes):
            found = {p for p in _tensors(self.model, _used(node)).values() if isinstance(p, nn.Parameter)} - seen
            seen |= found
            if node.op == "call_module" and any(p.requires_grad for p in found):
                sizes[at] = sum(p.numel() for p in found)
        if len(sizes) < number:
            raise ConfigError(
                f"the model has {len(sizes)} layers to cut it between, too few for {number} stages: use fewer"
            )
        layers = list(sizes)
        return [layers[first] for first in evenly(list(sizes.values()), number)[1:]]

    def _named(self, split: Sequence[str]) -> list[int]:
        layers = [str(node.target) if node.op == "call_module" else "" for node in self._nodes]
        starts = []
        for name in split:
            found = [at for at, layer in enumerate(layers) if layer == name or layer.startswith(f"{name}.")]
            if not found:
                raise ConfigError(
                    f"strategy.split names {name}, and the model has no such layer; {nearest(name, filter(None, layers))}"
                )
            starts.append(found[0])
        if starts != sorted(set(starts)) or starts[0] == 0:
            raise ConfigError(
                f"strategy.split={list(split)} is not in the order of the forward pass, or leaves a stage empty: {', '.join(filter(None, layers))}"
            )
        return starts


def subset(model: nn.Module, targets: Iterable[str]) -> nn.Module:
    """Return a module with the layers and tensors `targets` of `model`, under the same names and in the same order."""
    graph, names = fx.Graph(), list(model.state_dict())
    place = {
        target: next((at for at, name in enumerate(names) if _within(name, target)), len(names)) for target in targets
    }
    for target in sorted(place, key=place.__getitem__):
        graph.get_attr(target)
    graph.output(None)
    return fx.GraphModule(model, graph)


def move(model: nn.Module, targets: Iterable[str], device: torch.device) -> None:
    """Move only the layers and tensors `targets` of `model` to `device`."""
    for target in targets:
        where, _, name = target.rpartition(".")
        parent = model.get_submodule(where)
        value = getattr(parent, name)
        if isinstance(value, nn.Parameter):
            value.data = value.data.to(device)
        else:
            setattr(parent, name, value.to(device))


def evenly(sizes: Sequence[int], number: int) -> list[int]:
    """Cut `sizes` into `number` runs so that the largest sum of a run is minimal; return where each run begins."""
    until = [0, *accumulate(sizes)]

    @cache
    def best(first: int, parts: int) -> tuple[int, tuple[int, ...]]:
        if parts == 1:
            return until[-1] - until[first], (first,)
        rest = ((end, *best(end, parts - 1)) for end in range(first + 1, len(sizes) - parts + 2))
        return min((max(until[end] - until[first], largest), (first, *starts)) for end, largest, starts in rest)

    return list(best(0, number)[1])


class _Tracer(fx.Tracer):
    """Traces into modules that contain blocks or names of `inside`, and into Sequentials; all others are leaves."""

    def __init__(self, model: nn.Module, inside: Sequence[str]):
        super().__init__()
        self._blocks, self._inside = blocks(model), inside

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        within = f"{module_qualified_name}."
        if any(name.startswith(within) for name in self._inside) or isinstance(m, nn.Sequential):
            return False
        own = type(m).__module__.startswith("torch.nn")
        return own or module_qualified_name in self._blocks or not any(name.startswith(within) for name in self._blocks)


def _traced(model: nn.Module, *, inside: Sequence[str]) -> fx.Graph:
    parameters = list(inspect.signature(model.forward).parameters.values())[1:]
    fixed = {p.name: p.default for p in parameters if p.default is not p.empty}
    graphs = []
    for training in (False, True):
        try:
            set_mode(model, training)
            graphs.append(_Tracer(model, inside).trace(model, concrete_args=fixed or None))
        except Exception as error:
            raise ConfigError(
                f"strategy=pipeline cannot follow the forward pass of {type(model).__name__} ({one_line(error)[:200]}): "
                "make the model an nn.Sequential, or put what depends on values into its layers"
            ) from error
    if str(graphs[0]) != str(graphs[1]):
        raise ConfigError(
            f"strategy=pipeline cannot cut {type(model).__name__}, whose forward pass asks self.training: leave that to its layers"
        )
    for extra in [node for node in graphs[1].nodes if node.op == "placeholder"][1:]:
        _erase(graphs[1], extra)
    return graphs[1]


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _used(node: fx.Node) -> list[str]:
    """Names of the layers and tensors of the model that an operation uses."""
    attributes = [str(used.target) for used in node.all_input_nodes if used.op == "get_attr"]
    return [*attributes, str(node.target)] if node.op == "call_module" else attributes


def _tensors(model: nn.Module, targets: Iterable[str]) -> dict[str, Any]:
    """The model's state dict entries at or under `targets`, by name."""
    state = model.state_dict(keep_vars=True)
    return {name: state[name] for target in dict.fromkeys(targets) for name in state if _within(name, target)}


def _within(name: str, target: str) -> bool:
    return not target or name == target or name.startswith(f"{target}.")


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost elements of the model's ModuleLists and Sequentials by name, in order; one that is an element itself gives its own."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in found)
        parent = model.get_submodule(name.rpartition(".")[0])
        if name and not inside and isinstance(parent, nn.ModuleList | nn.Sequential):
            if not isinstance(module, nn.ModuleList | nn.Sequential):
                found[name] = module
    return found
