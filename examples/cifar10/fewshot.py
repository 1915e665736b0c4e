"""Logistic regression on frozen features with 1, 5 or 10 pictures a class: the embedded model against random weights.

    python examples/cifar10/fewshot.py DATA

DATA is CIFAR-10's binary version (see prepare.py). Ten draws of pictures from the held-out thousand, which the embedded
model has not learnt from; all 10,000 test pictures tell how well. Kept in results/fewshot.json.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor

import vitlite
from vitlite.images import normalise
from vitlite.training import Pictures, read_cifar10
from vitlite.training.augment import shuffled
from vitlite.weights.sidecar import recipe_from_record

RESULTS = Path(__file__).parent / "results" / "fewshot.json"
NAME, SHOTS, DRAWS = "vit_nano_4.cifar10", (1, 5, 10), 10


def features(model: vitlite.ViT, pictures: Pictures) -> Tensor:
    """What the head sees, each vector of length one: (n, d)."""
    recipe = recipe_from_record(vitlite.info(NAME), (32, 32))
    parts = []
    with torch.inference_mode():
        for rows in torch.arange(len(pictures)).split(250):
            parts.append(model.embed(normalise(pictures.images[rows], recipe, channels=3)))
    return F.normalize(torch.cat(parts)).clone()


def some_of_each(pictures: Pictures, count: int, draw: int) -> Tensor:
    """So many pictures of each class, others in each draw: (10 * count,)."""
    order = shuffled(draw, 0, len(pictures))
    return torch.cat([order[pictures.labels[order] == k][:count] for k in range(10)])


def regression(x: Tensor, labels: Tensor) -> Tensor:
    """The weights of a logistic regression with a little decay: (d, classes)."""
    weights = torch.zeros(x.shape[1], 10, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(10 * x @ weights, labels) + 1e-3 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    models = {"embedded": vitlite.create(NAME), "random": vitlite.create(NAME, weights=None).eval()}
    few, test = (read_cifar10(args.data, split) for split in ("val", "test"))
    results: dict[str, dict[str, list[float]]] = {}
    for name, model in models.items():
        x, unseen = features(model, few), features(model, test)
        for shots in SHOTS:
            scores = []
            for draw in range(DRAWS):
                rows = some_of_each(few, shots, draw)
                answers = (unseen @ regression(x[rows], few.labels[rows])).argmax(1)
                scores.append(float((answers == test.labels).float().mean()))
            results.setdefault(name, {})[str(shots)] = [round(mean(scores), 4), round(stdev(scores), 4)]
            print(name, shots, results[name][str(shots)], flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
