"""How fast int8 is, beside float32, bfloat16 and OpenVINO's int8 if openvino and nncf are installed.

    python benchmarks/int8.py [--model vit_base_16] [--batch 1,8] [--rounds 20] [--float32]

The model has random weights and is calibrated on random images, which is enough for times. OpenVINO's int8 is NNCF's
post-training quantisation with its settings for transformers, on the graph that torch traces. What is not in int8 is in
bfloat16, for both, where the CPU is fast with it. All take turns, and the best time of each counts. For one image, the
operators that take longest are listed; the profiler does not follow the threads of larger batches. How often the
answers are the same: benchmarks/agreement.py.

For the times of older CPUs pass --float32, so that nothing is in bfloat16, and limit oneDNN by
ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI (servers) or AVX2_VNNI (laptops).
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from peer_models import load, traced
from torch import Tensor

import vitlite
from vitlite import kernels
from vitlite.fast import optimize as optimize_module
from vitlite.fast.measure import Benchmark, difference, machine, measure, optimized, random_model
from vitlite.fast.optimize import optimize
from vitlite.presets import PRESETS

CALIBRATION = 8  # images
SHOWN = 8  # operators


def ours(model: vitlite.ViT, calibration: Tensor, images: Tensor) -> Benchmark:
    """Return the benchmark of vitlite's int8."""
    model = copy.deepcopy(model)
    model.preprocess = torch.stack  # the images are prepared
    optimize(model, dtype=torch.int8, calibrate=calibration.unbind())
    return Benchmark("vitlite, int8", torch.int8, lambda: model(images))


def openvino(model: vitlite.ViT, calibration: Tensor, images: Tensor) -> Benchmark:
    """Return the benchmark of OpenVINO's int8, for images of this shape."""
    library, nncf = load("openvino"), load("nncf")
    batches = calibration.repeat(len(images), 1, 1, 1).split(len(images))
    graph = nncf.quantize(
        traced(model, images),
        nncf.Dataset([batch.numpy() for batch in batches]),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=CALIBRATION,
    )
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "bf16" if kernels.is_fast_in(torch.bfloat16) else "f32",
    }
    compiled, given = library.Core().compile_model(graph, "CPU", settings), images.numpy()
    return Benchmark("OpenVINO, int8", torch.int8, lambda: compiled(given)[0])


def where_time_goes(run: Callable[[], Any]) -> str:
    """Return the operators that take longest, with their share and number of calls."""
    with torch.profiler.profile() as profile:
        run()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    parts = [f"{event.key} {event.self_cpu_time_total / total:.0%} in {event.count}" for event in events[:SHOWN]]
    return ", ".join(parts)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="vit_base_16", metavar="PRESET")
    parser.add_argument("--batch", default="1,8", metavar="N,N")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--float32", action="store_true", help="use no bfloat16, as older CPUs")
    args = parser.parse_args()
    if args.float32:
        kernels.is_fast_in = optimize_module.is_fast_in = lambda dtype: dtype is not torch.bfloat16
    model = random_model(PRESETS[args.model])
    torch.manual_seed(0)
    calibration = torch.randn(CALIBRATION, model.config.channels, *model.config.size)
    print(machine())
    print("\n| batch | | ms | times as long as vitlite's int8 | difference from float32 |\n|---|---|---|---|---|")
    for batch in map(int, args.batch.split(",")):
        images = torch.randn(batch, model.config.channels, *model.config.size)
        show(model, calibration, images, args.rounds)


def show(model: vitlite.ViT, calibration: Tensor, images: Tensor, rounds: int) -> None:
    """Print a row for each benchmark, then the operators of vitlite's."""
    with torch.inference_mode():
        right = model(images)
    benchmarks = [ours(model, calibration, images), optimized(model, images, torch.float32)]
    if kernels.is_fast_in(torch.bfloat16):
        benchmarks.append(optimized(model, images, torch.bfloat16))
    try:
        benchmarks.append(openvino(model, calibration, images))
    except ImportError as error:
        print(f"(without OpenVINO: {error})")
    measure(benchmarks, rounds)
    first = benchmarks[0]
    for one in benchmarks:
        name = one.name if one.dtype is torch.int8 else f"vitlite, {str(one.dtype).removeprefix('torch.')}"
        times = f"{1e3 * one.best:.1f} | {one.best / first.best:.2f}"
        print(f"| {len(images)} | {name} | {times} | {difference(one.run(), right):.1e} |")
    print(f"\n{where_time_goes(first.run)}\n" if len(images) == 1 else "")


if __name__ == "__main__":
    main()
