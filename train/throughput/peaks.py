"""Peak rates of devices, for the model FLOPs utilization. A device that is not listed has none."""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """Peak rates of dense matrix products in TFLOP/s, by the type that is multiplied; None: not on tensor cores.

    NVIDIA's data sheets give twice these numbers where they count structured sparsity.
    """

    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float


H100_SXM = Peak(bf16=989.4, fp16=989.4, tf32=494.7, fp32=66.9)
A100 = Peak(bf16=312.0, fp16=312.0, tf32=156.0, fp32=19.5)
V100_SXM = Peak(bf16=None, fp16=125.0, tf32=None, fp32=15.7)

PEAKS = {
    "NVIDIA H200": H100_SXM,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H100 PCIe": Peak(bf16=756.0, fp16=756.0, tf32=378.0, fp32=51.0),
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "Tesla V100-SXM2-16GB": V100_SXM,
    "Tesla V100-SXM2-32GB": V100_SXM,
}
"""By torch.cuda.get_device_name().

Source: NVIDIA's data sheets and architecture papers. H100: "NVIDIA H100 Tensor Core GPU Architecture", 2022, table 2 (SXM5
and PCIe); H200: its data sheet, the same rates. A100: "NVIDIA A100 Tensor Core GPU Architecture", 2020, table 1. V100:
"NVIDIA Tesla V100 GPU Architecture", 2017, table 1.
"""


def peak_flops(device: str, *, dtype: str) -> float | None:
    """Return the peak rate of `device` in FLOP/s for products of `dtype` (a field of Peak); None if it is not known."""
    rate: float | None = getattr(PEAKS.get(device), dtype, None)
    return rate * 1e12 if rate else None
