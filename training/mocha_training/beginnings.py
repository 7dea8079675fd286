"""What a run begins with: a network with its first weights, or a checkpoint's, grown if asked.

And whether one that is resumed was begun with the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mocha_model import config as model_config
from mocha_model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from mocha_model.config import ModelConfig, SearchConfig
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training.config import Preset, TrainConfig
from mocha_training.data import Corpus
from mocha_training.weights import draw_weights, grown

TOLD_APART = SearchConfig(prior_weight=0.25, length_bonus=0.5)  # for a CTC head of `denominator_weight`
BESIDE_PHONES = {"language_weight": 1.5, "length_bonus": 0.8}  # when two that hear stand against the language model

# What a resumed run may be told otherwise: how long it is, what is kept and measured; and `preset`, since a
# checkpoint's network need not be that. The network itself is compared.
LENGTHS = {"steps", "epochs", "max_minutes"}
MAY_CHANGE = LENGTHS | {"evaluate_every", "save_every", "average_last", "final", "fold_phones", "preset"}
MOST_NAMED = 6  # differences, and symbols of one, in a message


def feature_statistics(model: SpeechModel, corpus: Corpus, count: int, seed: int) -> None:
    """Set the normalisation of `model` from `count` utterances of `corpus`."""
    chosen = np.random.default_rng(seed).permutation(len(corpus.utterances))[:count]
    frames = [
        model.features.raw(torch.from_numpy(a)[None], torch.tensor([len(a)]))[0][0] for a in map(corpus.audio, chosen)
    ]
    everything = torch.cat(frames)
    model.features.set_normalization(everything.mean(0), everything.std(0))


def refuse_without_model(config: TrainConfig) -> None:
    """Raise ValueError for a run that has to begin with a model that reads."""
    if config.augment.splice_probability:
        raise ValueError("utterances are spliced where a model that reads finds pauses: it is given with --init")
    if not config.train_encoder:
        raise ValueError("an encoder that is not trained is that of a model that reads: it is given with --init")


def refuse_beside_model(mechanism: str | None, chunk_width: int | None, settings: Iterable[str]) -> None:
    """Raise ValueError for options that would change a network which comes from a checkpoint, and do not."""
    if mechanism is not None or chunk_width is not None:
        raise ValueError("--init brings an attention, so there is no --mechanism or --chunk-width beside it")
    if any(setting.partition("=")[0] == "preset" for setting in settings):
        raise ValueError("--init brings a network, which --preset grows, and --set preset would not")


def begun_with(config: TrainConfig, model: SpeechModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """By name, in JSON's types, all that has to be the same when a run is resumed: symbols, recipe, network."""
    network = model.config.model_dump(mode="json", exclude={"vocab_size", "phones"})
    recipe = config.model_dump(mode="json", exclude=MAY_CHANGE)
    labels = {"symbols": list(tokenizer.symbols), "phones": list(model.config.phones)}
    return labels | recipe | {"network": network}


def refuse_other(path: Path, kept: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError where `now` is not what the run of `path` was begun with; both as `begun_with` returns them.

    What `kept` lacks is not compared: versions before wrote less, or had no such field.
    """
    found = list(_differences(kept, now))
    if found:
        raise ValueError(f"{path}: the run was begun with {_first('; ', found)}. Another run needs another directory")


def _differences(kept: dict[str, Any], now: dict[str, Any], within: str = "") -> Iterator[str]:
    """What of `kept` is another in `now`, each as a message has it."""
    for name, new in now.items():
        old = kept.get(name, new)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{within}{name}.")
        elif old != new and name in ("symbols", "phones"):
            yield f"other {name}: {_first(', ', [repr(symbol) for symbol in sorted({*old} ^ {*new})])}"
        elif old != new:
            yield f"{within}{name} {old}, not {new}"


def _first(between: str, found: list[str]) -> str:
    """As many of `found` as a message may have."""
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return between.join(found[:MOST_NAMED]) + more


def first_model(config: TrainConfig, corpus: Corpus, mechanism: str | None, chunk_width: int | None) -> Checkpoint:
    """A network with its first weights, the symbols of `corpus` and its features' statistics; made of nothing yet."""
    tokenizer = Tokenizer.from_texts((u.text for u in corpus.utterances), config.units)
    torch.manual_seed(config.seed)
    sizes: ModelConfig = getattr(model_config, config.preset)(tokenizer.vocab_size)
    sizes = _searched(_told(sizes, sizes, config), config)
    attention = {"mechanism": mechanism, "chunk_width": chunk_width}
    model = SpeechModel(sizes.with_attention(**{k: v for k, v in attention.items() if v is not None}))
    draw_weights(model, config.init)
    feature_statistics(model, corpus, 500, config.seed)
    return Checkpoint(model, tokenizer, provenance={})


def started(init: Path, config: TrainConfig, preset: Preset | None) -> Checkpoint:
    """The checkpoint to start from, grown to `preset` if there is one. Raises CheckpointError or ValueError."""
    start = load_checkpoint(init)
    if start.tokenizer.units != config.units:
        raise CheckpointError(f"{init}: its units are {start.tokenizer.units}, the recipe's {config.units}")
    wanted = start.config
    if preset is not None:
        sizes: ModelConfig = getattr(model_config, preset)(start.tokenizer.vocab_size)
        sizes = sizes.model_copy(update={"phones": start.config.phones})
        wanted = sizes.with_attention(**start.config.attention.model_dump())
    wanted = _searched(_told(wanted, start.config, config), config)
    if wanted == start.config:
        return start
    torch.manual_seed(config.seed)
    model = grown(start.model, wanted)
    if not config.train_encoder:  # what is left out of it for the sake of heads is not to be left out of it for good
        model.config = wanted.with_dropout(start.config.encoder.dropout)
    return replace(start, model=model, calibration=None, file_calibration=None)


def _told(model: ModelConfig, otherwise: ModelConfig, config: TrainConfig) -> ModelConfig:
    """`model`, with what no weight depends on as `config` tells, or as `otherwise` has it."""
    dropout = otherwise.encoder.dropout if config.dropout is None else config.dropout
    ahead = otherwise.encoder.look_ahead if config.look_ahead is None else config.look_ahead
    hop = config.hop_samples or otherwise.features.hop_samples
    return model.with_dropout(dropout).with_hop(hop).with_look_ahead(ahead)


def without_phones(search: SearchConfig) -> SearchConfig:
    """`search`, which was for a model with a head of phones, for one without."""
    told_apart = search.prior_weight == TOLD_APART.prior_weight
    usual = TOLD_APART if told_apart else SearchConfig()
    weights = {"language_weight": usual.language_weight, "length_bonus": usual.length_bonus}
    return search.model_copy(update=weights)


def _searched(model: ModelConfig, config: TrainConfig) -> ModelConfig:
    """`model`, to be searched as what `config` trains wants it, and without phones of an encoder that will be another.

    Where a head of phones alone is trained, only the language model's weight is another, and what that costs is given
    back with each symbol.
    """
    search = model.search if config.phones_alone else TOLD_APART if config.denominator_weight else SearchConfig()
    phones = model.phones if config.phone_weight or not config.train_encoder else ()
    heard = config.phone_weight or phones
    beside = BESIDE_PHONES if heard else {"language_weight": SearchConfig().language_weight}
    return model.model_copy(update={"search": search.model_copy(update=beside), "phones": phones})
