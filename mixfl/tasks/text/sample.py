"""`mixfl sample`: text written by a trained model of the text task."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta

from mixfl.errors import MixflError
from mixfl.tasks import task_in
from mixfl.tasks.text.char_model import cell, output, projected
from mixfl.tasks.text.vocabulary import FILE, FIRST, Vocabulary
from mixfl.validation import Index, check

LONGEST = 1_000_000


class Sample(NamedTuple):
    text: str  # what follows the prompt
    unknown: str  # characters of the prompt that are not in the vocabulary


def sample(
    folder: Path, config: Mapping[str, Any], params: Any, prompt: str = "", length: int = 300,
    temperature: float = 0.7, seed: int = 0,
) -> Sample:  # fmt: skip
    """Characters drawn one after the other, each from the model's prediction after those before.

    `config` and `params` are those of the run in `folder`. p is sharpened to p^(1/temperature)
    first; at 0 the likeliest character is taken. Padding and the unknown symbol are never drawn.
    Without a prompt the text begins as after a space.
    """
    check("--length", length, Annotated[int, Meta(ge=1, le=LONGEST)])
    check("--temperature", temperature, Annotated[float, Meta(ge=0, le=100)])
    check("--seed", seed, Index)
    vocabulary = trained_vocabulary(folder, config, params)
    ids = vocabulary.encode(prompt or " ").astype(np.int32)
    drawn = generate(params, ids, length, temperature, seed)
    unknown = dict.fromkeys(c for c in prompt if c not in vocabulary.characters)
    return Sample(vocabulary.decode(drawn), "".join(unknown))


def trained_vocabulary(folder: Path, config: Mapping[str, Any], params: Any) -> Vocabulary:
    if task_in(config) != "text":
        raise MixflError(
            f"{folder} is a run of {task_in(config)}: `mixfl sample` needs a run of the text task."
        )
    if params is None:
        raise MixflError(f"{folder} has no model yet: finish the run with --resume.")
    vocabulary = Vocabulary.read(folder / FILE)
    if len(params["embedding"]) != len(vocabulary):
        raise MixflError(
            f"{folder / FILE} has {len(vocabulary)} symbols, expected {len(params['embedding'])} "
            "as the model has: restore it, or train again."
        )
    return vocabulary


def generate(params, prompt: np.ndarray, length: int, temperature: float, seed: int) -> np.ndarray:
    """The numbers of `length` characters after the prompt."""
    key = jax.random.key(seed)
    return np.asarray(_generated(params, prompt, key, np.float32(temperature), length=length))


@partial(jax.jit, static_argnames="length")
def _generated(params, prompt, key, temperature, length: int):
    inputs, gru = projected(params), params["gru"]
    never = jnp.where(jnp.arange(len(inputs)) < FIRST, -jnp.inf, 0.0)

    def read(h, i):
        return cell(h, inputs[i], gru["u"], gru["b_u"]), None

    def draw(h, key):
        z = output(params, h) + never
        noise = temperature * jax.random.gumbel(key, z.shape)
        i = jnp.argmax(z + noise)  # Gumbel's trick: a draw from softmax(z / temperature)
        return read(h, i)[0], i

    h, _ = jax.lax.scan(read, jnp.zeros(len(gru["u"])), prompt)
    return jax.lax.scan(draw, h, jax.random.split(key, length))[1]
