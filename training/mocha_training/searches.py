"""The search that `evaluate` is asked for, from options that may be given or not. No files, no terminal."""

import math
from collections.abc import Iterable
from typing import Any

from mocha_model.beam import BeamConfig
from mocha_model.config import ModelConfig
from mocha_model.joint import JointConfig
from mocha_model.language import WordLanguageModel
from mocha_model.recognizer import LEAST_EVIDENCE, joint_fusion
from mocha_model.scorers import Fusion
from mocha_training.evaluate import Beam

LANGUAGE_OPTIONS = {  # and what `joint_fusion` calls them
    "lm_weight": "language_weight",
    "prior_weight": "prior_weight",
    "phone_weight": "phone_weight",
}
MAY_BE_INFINITE = ("threshold", "caution")  # nothing is pruned, or emitted early
BEAM_LANGUAGE_WEIGHT = 0.4  # in beam search, where more of it makes more errors (docs/decisions/0008)


class OptionError(ValueError):
    """Options of a search that do not go together; the message names them."""


def refuse_useless(beam: int, joint: int, settle: bool, options: dict[str, Any]) -> None:
    """An option that the search asked for does not have would change nothing without a word; raises OptionError.

    So does a number that is none, or is infinite where that means nothing.

    `options` are all there are, by name, None where one was not given.
    """
    for name, value in given(options).items():
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and name not in MAY_BE_INFINITE)):
            raise OptionError(f"{_flags([name])}: {value} is no finite number")
    if beam and joint:
        raise OptionError("--beam and --joint exclude each other")
    has, of_language = {"decoding"}, set[str]()
    if beam or joint:
        of_language = set(LANGUAGE_OPTIONS) if joint else {"lm_weight"}
        has = {*(BeamConfig if beam else JointConfig).__annotations__, "lm", *of_language}
    if useless := _flags(name for name in given(options) if name not in has):
        kind = "beam" if beam else "joint" if joint else "greedy"
        raise OptionError(f"{useless}: not an option of {kind} search")
    if not options["lm"] and (lonely := _flags(name for name in given(options) if name in of_language)):
        raise OptionError(f"{lonely}: an option of the language model, so --lm belongs beside it")
    if settle and (not joint or options["patience"] is not None):
        raise OptionError("--settle needs --joint, and has no --patience")


def _flags(names: Iterable[str]) -> str:
    """What a user types for options, "" for none."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Those of `options` that were given."""
    return {name: value for name, value in options.items() if value is not None}


def asked_for(
    beam: int,
    joint: int,
    settle: bool,
    options: dict[str, Any],
    language: WordLanguageModel | None,
    config: ModelConfig,
) -> Beam | None:
    """Beam search of so many hypotheses, or joint search of so many prefixes, with what was given; None for greedy.

    `config` is what the model wants of joint search where nothing was given.
    """
    told = given(options)
    weights = {new: told.pop(name) for name, new in LANGUAGE_OPTIONS.items() if name in told}
    if joint:
        fusion = joint_fusion(language, config, **weights) if language else Fusion(())
        own = {"length_bonus": config.search.length_bonus}
        if language and "patience" not in told:  # as files are read
            own["least_evidence"] = LEAST_EVIDENCE
        return Beam(JointConfig(joint, **own | told), fusion, settle)
    if beam:
        weight = weights.get("language_weight", BEAM_LANGUAGE_WEIGHT)
        return Beam(BeamConfig(beam, **told), Fusion(((weight, language),) if language else ()))
    return None
