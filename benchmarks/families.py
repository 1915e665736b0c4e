"""How fast other families are beside OpenVINO: SigLIP, DINOv3, EVA-02 and the Perception Encoder, as timm makes them.

    python benchmarks/families.py [NAME ...] [--batch 1,8] [--rounds 15]

timm builds the network with random weights and writes its file; vitlite reads the file and is optimized, OpenVINO is
given timm's own network. Both take turns, and the best time of each counts.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peer_models import compiled_by_openvino, load
from safetensors.torch import save_file
from torch import Tensor, nn

import vitlite
from vitlite.fast.measure import Benchmark, difference, machine, measure, optimized

NAMES = {
    "vit_base_16.siglip_v2_webli": "vit_base_patch16_siglip_224.v2_webli",
    "vit_base_16.dinov3_lvd1689m_256": "vit_base_patch16_dinov3.lvd1689m",
    "vit_base_swiglu_14.eva02_mim_in22k": "eva02_base_patch14_224.mim_in22k",
    "vit_base_16.pe_core_fb": "vit_pe_core_base_patch16_224.fb",
}
DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES), metavar="NAME", help="of vitlite; default: all four")
    parser.add_argument("--batch", default="1,8", metavar="N,N")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(machine())
    print("\n| model | batch | dtype | ms | OpenVINO | difference |\n|---|--:|---|--:|--:|--:|")
    for ours in args.names:
        classes = vitlite.info(ours).config.num_classes
        network = load("timm").create_model(NAMES[ours], pretrained=False, num_classes=classes).eval()
        model = read_from(network, ours)
        for batch in map(int, args.batch.split(",")):
            images = torch.randn(batch, 3, *model.config.size)
            for dtype in DTYPES:
                show(ours, model, network, images, dtype, args.rounds)


def read_from(network: nn.Module, name: str) -> vitlite.ViT:
    """The same model by vitlite, from the file of timm."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        save_file({key: value.contiguous() for key, value in network.state_dict().items()}, file)
        return vitlite.create(name, weights=file).eval().requires_grad_(False)


def show(name: str, model: vitlite.ViT, network: nn.Module, images: Tensor, dtype: torch.dtype, rounds: int) -> None:
    """A row of the table."""
    theirs: Callable[[], Any] = compiled_by_openvino(network, images, narrow=dtype is torch.bfloat16)
    with torch.inference_mode():
        right = model(images)
    benchmarks = [optimized(model, images, dtype), Benchmark("OpenVINO", dtype, theirs)]
    measure(benchmarks, rounds)
    mine, other = benchmarks
    error = max(difference(one.run(), right) for one in benchmarks)
    times = f"{1e3 * mine.best:.1f} | {other.best / mine.best:.2f}"
    print(f"| {name} | {len(images)} | {str(dtype).removeprefix('torch.')} | {times} | {error:.0e} |")


if __name__ == "__main__":
    main()
