"""Plots the figures of the example gallery, in .images/.

Runs these examples in full, which takes about a minute. Requires matplotlib.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).parents[1]))

from models import digits
from models.examples import explanations, physics, saliency

FOLDER = Path(__file__).parents[1] / ".images"
COLORS = pyplot.get_cmap("RdBu_r")


def draw_physics() -> None:
    """Plots Burgers' equation: the solution of the network, and the exact one at some times."""
    u, exact = physics.solve(epochs=400)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(7.2, 2.7), layout="constrained", width_ratios=(1.15, 1)
    )
    x, t = np.linspace(-1, 1, u.shape[1]), np.linspace(0, 1, len(u))
    shown = left.contourf(x, t, u, levels=np.linspace(-1.1, 1.1, 23), cmap=COLORS)
    figure.colorbar(shown, ax=left, ticks=[-1, 0, 1])
    left.set(xlabel="x", ylabel="t", title="u(x, t) of the network")
    for color, time in enumerate((0, 0.25, 0.5, 1)):
        row = round(time * (len(u) - 1))
        right.plot(x, exact[row], color=f"C{color}", alpha=0.4, linewidth=4)
        right.plot(x, u[row], color=f"C{color}", linewidth=1, label=f"t = {time}")
    right.set(xlabel="x", title="network (thin), exact (thick)")
    right.legend(frameon=False, fontsize="small")
    right.spines[["top", "right"]].set_visible(False)
    save(figure, "physics")


def draw_saliency() -> None:
    """Plots digits, the pixels they are recognized by, and what they are mistaken for."""
    test, reader = digits.load().test, saliency.Reader(epochs=15)
    images = test.images[[np.flatnonzero(test.labels == digit)[1] for digit in range(1, 9)]]
    changed = reader.attack(images)
    before, after = (reader.logits(each) for each in (images, changed))
    slopes = reader.slopes(images, np.eye(10)[before.argmax(axis=1)])
    figure, axes = pyplot.subplots(3, len(images), figsize=(7.2, 3.1), layout="constrained")
    for column, (image, slope, attacked) in enumerate(zip(images, slopes, changed, strict=True)):
        most = abs(slope).max()
        axes[0, column].imshow(1 - image[0], cmap="gray", vmin=0, vmax=1)
        axes[0, column].set_title(f"{before[column].argmax()}")
        axes[1, column].imshow(slope[0], cmap=COLORS, vmin=-most, vmax=most)
        axes[2, column].imshow(1 - attacked[0], cmap="gray", vmin=0, vmax=1)
        axes[2, column].set_title(f"{after[column].argmax()}", color="C3")
    for row, name in zip(
        axes, ("read as", "for (red),\nagainst (blue)", "changed,\nread as"), strict=True
    ):
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
        for each in row:
            each.set(xticks=[], yticks=[])
    save(figure, "saliency")


def draw_explanations() -> None:
    """Plots digits, and the pixels that each attribution method ranks highest."""
    test = digits.load().test
    images = test.images[[np.flatnonzero(test.labels == digit)[1] for digit in range(8)]]
    sessions = explanations.explained(explanations.train(epochs=15))
    figure, axes = pyplot.subplots(5, len(images), figsize=(7.2, 4.6), layout="constrained")
    rows = {"digit": images} | {
        name: session.run(["attribution"], {"images": images})[0]
        for name, session in sessions.items()
    }
    for row, (name, maps) in zip(axes, rows.items(), strict=True):
        row[0].set_ylabel(name.replace(" ", "\n"), rotation=0, ha="right", va="center")
        for each, found in zip(row, maps, strict=True):
            most = abs(found).max()
            colors = (
                {"cmap": "gray_r", "vmin": 0}
                if name == "digit"
                else {"cmap": COLORS, "vmin": -most}
            )
            each.imshow(found[0], vmax=most, **colors)
            each.set(xticks=[], yticks=[])
    save(figure, "explanations")


def save(figure: pyplot.Figure, name: str) -> None:
    """Writes a figure as PNG."""
    path = FOLDER / f"{name}.png"
    figure.savefig(path, dpi=100)
    print(f"Wrote {path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    pyplot.switch_backend("Agg")
    draw_explanations()
    draw_saliency()
    draw_physics()
