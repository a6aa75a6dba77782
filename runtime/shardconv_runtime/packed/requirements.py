"""What a machine needs to compute with weights that stay packed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Requirement:
    """Of one format."""

    packages: tuple[str, ...]
    """That transformers imports, as pip names them."""
    why: str
    """What they are for, and where they compute; a phrase for errors and model cards."""

    @property
    def command(self) -> str:
        """Installs them."""
        return f"pip install {' '.join(self.packages)}"


BNB = Requirement(("bitsandbytes", "accelerate"), "bitsandbytes has the kernels, for CPUs and GPUs")

REQUIREMENTS = {
    "awq": Requirement(("gptqmodel", "accelerate"), "gptqmodel has the kernels, for CPUs and GPUs"),
    "bnb_4bit": BNB,
    "bnb_8bit": BNB,
    "compressed_tensors": Requirement(
        ("compressed-tensors",),
        "compressed-tensors reads the tensors; it dequantizes most of its formats to compute",
    ),
    "fbgemm_fp8": Requirement(
        ("accelerate", "fbgemm-gpu-genai"),
        "fbgemm-gpu-genai has the kernels, for GPUs with compute capability 9.0 or more",
    ),
    "fp8": Requirement(
        ("accelerate", "kernels"),
        "kernels downloads those that multiply float8, for GPUs with compute capability 8.9 or more",
    ),
    "gptq": Requirement(
        ("gptqmodel", "optimum"),
        "gptqmodel has the kernels, for CPUs and GPUs, and optimum puts them into the model",
    ),
    "mxfp4": Requirement(
        ("accelerate", "kernels"),
        "kernels downloads those that multiply 4-bit floats, for GPUs with compute capability 7.5 or more",
    ),
    "torchao": Requirement(("torchao",), "torchao has the classes of tensors, for CPUs and GPUs"),
}
"""By the method of a packing."""


def requirement(method: str) -> Requirement:
    """What computing with a packed parameter of this method needs."""
    return REQUIREMENTS[method]
