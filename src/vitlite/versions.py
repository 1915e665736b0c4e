"""Where it matters which version of something is installed, and what vitlite does about it; all of it in one table.

Nothing here is decided by a version's number: what is there is asked, tried, or compared where it is used.
"""

from typing import NamedTuple


class Difference(NamedTuple):
    """Something that not every version that vitlite runs with has, or has right."""

    package: str
    since: str  # the first version that has it; "private": it may go any day
    what: str
    module: str  # where vitlite copes
    asks: str  # the line there by which it finds out
    otherwise: str  # what it does without


DIFFERENCES = (
    Difference(
        "torch", "2.8", "torch.export keeps batch and sides free, and traces every resampling of positions", "export",
        "if not far <= limit", "each file is compared with the model, and one that answers something else is refused",
    ),
    Difference(
        "torch", "2.8", "torch.compile does not ask for the parameters of a model that it may not look into",
        "speed.optimize", "torch.compiler.disable(", "it ends in the error that an optimized model has none to give",
    ),
    Difference(
        "torch", "2.9", "a setting that lets oneDNN multiply batches of float32 matrices", "speed.onednn",
        'getattr(torch.backends.mkldnn, "matmul", None)', "torch's own products, which are slower on some CPUs",
    ),
    Difference(
        "torch", "private", "oneDNN's packed and unpacked linear layers", "speed.onednn",
        "except (AttributeError, RuntimeError)", "torch's own linear layers",
    ),
    Difference(
        "torch", "private", "whether a tensor is wrapped by torch.func", "speed.onednn",
        'getattr(torch._C._functorch, "is_functorch_wrapped_tensor"', "while torch.func is at work, each tensor counts",
    ),
    Difference(
        "torch", "private", "whether torch.func is at work", "speed.onednn",
        'getattr(torch._C._functorch, "peek_interpreter_stack"', "it counts as at work; torch's own layers",
    ),
    Difference(
        "torch", "private", "whether the CPU has AMX", "speed.onednn",
        'getattr(torch.cpu, "_is_amx_tile_supported"', "no CPU counts as exact; torch's own products",
    ),
    Difference(
        "torch", "private", "oneDNN's products of bytes", "speed.int8",
        "except (AttributeError, RuntimeError)", "int8 is refused",
    ),
    Difference(
        "torch", "after 2.10", "which instructions the CPU has, on any system", "speed.cpu",
        'getattr(torch.cpu, "get_capabilities"', "Linux is asked, and torch whether there is AVX-512 BF16 or AMX",
    ),
    Difference(
        "torch", "private", "whether the CPU has AVX-512 BF16", "speed.cpu",
        'getattr(torch.cpu, "_is_avx512_bf16_supported"', "Linux is asked",
    ),
    Difference(
        "torch", "2.7", "torch.get_default_device knows of `with torch.device(...)`", "factory",
        "torch.empty(0).device", "an empty tensor is asked, in any version",
    ),
    Difference(
        "safetensors", "0.8", "checks a file without mapping it", "weights.files",
        "except TypeError:", "the file is mapped while its header is checked; tensors are read by vitlite either way",
    ),
    Difference(
        "huggingface-hub", "1.0", "asks by httpx, and not by requests", "weights.download",
        'hasattr(session, "build_request")', "the same by requests",
    ),
    Difference(
        "huggingface-hub", "1.0", "keeps one client for all, which must be closed for other proxies", "weights.network",
        'hasattr(huggingface_hub, "close_session")', "nothing; there is none",
    ),
    Difference(
        "numpy", "any", "torch warns where it is missing", "cli.main",
        '"Failed to initialize NumPy"', "nothing passes through numpy; the command does not pass the warning on",
    ),
)  # fmt: skip


def since(module: str) -> str:
    """The first version that has what a module has to cope without, for its errors.

    >>> since("export")
    '2.8'
    """
    return next(difference.since for difference in DIFFERENCES if difference.module == module)
