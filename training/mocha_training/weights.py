"""What a recipe does to the weights themselves: how they are drawn at the start, and noise on them in training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from mocha_model.config import ModelConfig
from mocha_model.encoder import ConvLSTM
from mocha_model.model import SpeechModel
from mocha_training.settings import Settings


class Draw(Settings):
    """A distribution around zero."""

    distribution: Literal["uniform", "normal"]
    scale: float = Field(gt=0, description="half the width, or the standard deviation (values beyond two are redrawn)")


class InitConfig(Settings):
    """How weight matrices and filters are drawn; None leaves each layer's own way. Vectors always keep theirs."""

    encoder: Draw | None = None
    decoder: Draw | None = Field(None, description="with the attention and the output layers")
    embedding: Draw | None = None


class WeightNoise(Settings):
    """Gaussian noise on weights during training (Graves 2011), drawn anew for every step."""

    std: float = Field(gt=0)
    from_step: int = Field(0, ge=0, description="steps without noise at the start")
    where: Literal["matrices", "lstm"] = Field(
        "matrices", description="every weight matrix; or all of each LSTM layer, biases too, and the embedding"
    )


def weight_matrices(model: SpeechModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and values of all matrices and filters: no biases, norms or scalars, and not v of the energies."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.endswith("energies.direction"):
            yield name, parameter


@torch.no_grad()
def draw_weights(model: SpeechModel, config: InitConfig) -> None:
    """Give `model` its first weights, from torch's global random state."""
    for name, parameter in weight_matrices(model):
        part = "embedding" if name.startswith("decoder.embedding.") else name.partition(".")[0]
        draw: Draw | None = getattr(config, part if part in ("encoder", "embedding") else "decoder")
        if draw is None:
            continue
        if draw.distribution == "uniform":
            parameter.uniform_(-draw.scale, draw.scale)
        else:
            nn.init.trunc_normal_(parameter, std=draw.scale, a=-2 * draw.scale, b=2 * draw.scale)


@torch.no_grad()
def grown(model: SpeechModel, config: ModelConfig) -> SpeechModel:
    """A network of `config`, wider or looking ahead, that computes what `model` does: for training to go on from.

    The units added have first weights from torch's global random state, and none of the old ones hears them: those
    weights are 0 (Net2Net, Chen et al. 2016, copies units instead), as are all of a look-ahead. In evaluation mode.

    Raises:
        ValueError: `config` is not `model`'s but for dropout, wider LSTM layers with wider projections, a look-ahead
            where there was none, how it is searched and, in `config`, no head of phones.

    """
    may_differ = ["lstm_sizes", "projection_size"]
    if not model.config.encoder.look_ahead:
        may_differ.append("look_ahead")
    changes = {name: getattr(config.encoder, name) for name in may_differ}
    same = model.config.model_copy(update={"encoder": model.config.encoder.model_copy(update=changes)})
    wider = SpeechModel(config).eval()
    old, new = model.state_dict(), wider.state_dict()
    if not config.phones:
        old = {name: kept for name, kept in old.items() if not name.startswith("phones.")}
    added = {name for name in new if name.startswith("encoder.look_ahead.")}
    if same.network() != config.network() or old.keys() | added != new.keys():
        raise ValueError("a network can only be grown in the widths of its LSTM layers, and by a look-ahead")
    for name, kept in old.items():
        gates = 4 if ".lstm." in name else 1  # whose rows follow one another in an LSTM's weights
        target, source = (t.reshape(gates, -1, *t.shape[1:]) for t in (new[name], kept))
        if any(a > b for a, b in zip(source.shape, target.shape, strict=True)):
            raise ValueError(f"a network can only be grown: {name} has {list(kept.shape)}, not {list(new[name].shape)}")
        target[:, : source.shape[1]] = 0
        target[tuple(slice(n) for n in source.shape)] = source
    return wider


def noisy_parameters(model: SpeechModel, where: Literal["matrices", "lstm"]) -> list[nn.Parameter]:
    """The parameters that weight noise is added to."""
    if where == "matrices":
        return [parameter for _, parameter in weight_matrices(model)]
    layers: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, ConvLSTM):
            layers += [module.input_conv, module.hidden_conv]  # not its batch norm
        elif isinstance(module, nn.LSTM | nn.LSTMCell | nn.Embedding):
            layers.append(module)
    return [parameter for layer in layers for parameter in layer.parameters()]


@contextmanager
def perturbed(parameters: Iterable[Tensor], std: float) -> Iterator[None]:
    """Within the block each of `parameters` has Gaussian noise of `std` added; then its value is put back exactly."""
    chosen = list(parameters) if std else []
    kept = [parameter.detach().clone() for parameter in chosen]
    with torch.no_grad():
        for parameter in chosen:
            parameter.add_(torch.randn_like(parameter), alpha=std)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(chosen, kept, strict=True):
                parameter.copy_(value)
