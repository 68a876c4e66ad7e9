"""`mixfl sample`: text that a trained model of the text task goes on with."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.errors import MixflError
from mixfl.runs.folder import load
from mixfl.tasks.text.char_model import cell, output, projected
from mixfl.tasks.text.vocabulary import FILE, FIRST, Vocabulary

LONGEST = 1_000_000


class Sample(NamedTuple):
    text: str  # what follows the prompt
    unknown: str  # characters of the prompt that the model does not know


def sample(
    run: str | Path, prompt: str = "", length: int = 300, temperature: float = 0.7, seed: int = 0
) -> Sample:
    """Characters drawn one after the other, each from what the model says of those before it.

    p is sharpened to p^(1/temperature) first; at 0 the likeliest is taken. Padding and the
    unknown symbol are never drawn. Without a prompt it begins as after a space.
    """
    if not 1 <= length <= LONGEST:
        raise MixflError(f"--length {length}: expected a whole number from 1 to {LONGEST}.")
    if not 0 <= temperature <= 100:
        raise MixflError(f"--temperature {temperature}: expected a number from 0 to 100.")
    if not 0 <= seed < 2**63:
        raise MixflError(f"--seed {seed}: expected a whole number from 0 to 2^63 - 1.")
    params, vocabulary = trained(Path(run))
    ids = vocabulary.encode(prompt or " ").astype(np.int32)
    drawn = generate(params, ids, length, temperature, seed)
    unknown = dict.fromkeys(c for c in prompt if c not in vocabulary.characters)
    return Sample(vocabulary.decode(drawn), "".join(unknown))


def trained(path: Path):
    """A run's model and its vocabulary."""
    run = load(path)
    if run.config.get("task") != "text":
        raise MixflError(
            f"{path} is a run of {run.config.get('task', 'another task')}: `mixfl sample` needs "
            "one of the text task."
        )
    if run.params is None:
        raise MixflError(
            f"{path} has no model yet (status: {run.status}): finish the run with --resume."
        )
    vocabulary = Vocabulary.read(path / FILE)
    if len(run.params["embedding"]) != len(vocabulary):
        raise MixflError(
            f"{path / FILE} has {len(vocabulary)} symbols, expected {len(run.params['embedding'])} "
            "as the model: restore it, or train again."
        )
    return run.params, vocabulary


def generate(params, prompt: np.ndarray, length: int, temperature: float, seed: int) -> np.ndarray:
    """Numbers of `length` characters that follow those of the prompt."""
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
