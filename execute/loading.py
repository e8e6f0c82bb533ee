"""From a stage's description to a torch model and its tokenizer.

A model is a Hugging Face id, a local folder, a GGUF file or a built-in name.  Models whose cache
cannot be rolled back (sliding window, recurrent, hybrid) are refused before the first token.

A model is data: code that comes with it is never run, and weights in a pickle, which may run any code as they
are read, are refused unless ``--trust-pickle`` was given.  A pipeline file cannot ask for it.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

from pipespec_model.errors import InputError
from pipespec_model.spec import StageSpec

from .host import available_cores
from .prompts import eos_ids
from .zoo import BUILT_IN, FAMILY, built_in_folder, family_folder

TRUST_PICKLE = "PIPESPEC_TRUST_PICKLE"
"""Set to 1 by ``--trust-pickle``: an environment variable, so that it reaches every stage's process."""
ONLY_DATA = {"trust_remote_code": False}
"""Said outright: left to itself transformers would ask at the terminal."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' own progress bars and load reports, off: stderr is for ours."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers.logging.set_verbosity(before)


def locate(model: str) -> str:
    """A name that transformers understands."""
    if model in FAMILY:
        return str(family_folder(model))
    return str(built_in_folder()) if model == BUILT_IN else model


def load_tokenizer(model: str) -> Any:
    path = Path(model)
    with _quiet():
        try:
            if path.suffix == ".gguf" and path.is_file():
                return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, **ONLY_DATA)
            return AutoTokenizer.from_pretrained(locate(model), **ONLY_DATA)
        except (OSError, ValueError, KeyError) as error:
            raise _cannot_load(model, error) from None


def end_of_sequence(model: str, tokenizer: Any) -> tuple[int, ...]:
    """Where generation stops: the model's generation config says, and may name several ids that the
    tokenizer does not; without one, the tokenizer."""
    try:
        found = eos_ids(GenerationConfig.from_pretrained(locate(model)))
    except (OSError, ValueError):
        found = ()
    return found or eos_ids(tokenizer)


def load_gguf(path: Path, dtype: str) -> tuple[Any, Any]:
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=DTYPES[dtype],
                                                     **ONLY_DATA)
        return model.eval(), AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, **ONLY_DATA)


def load_model(stage: StageSpec) -> Any:
    """The stage's model in evaluation mode, on its device, not quantised."""
    check_device(stage)
    path = Path(stage.model)
    with _quiet():
        try:
            if path.suffix == ".gguf" and path.is_file():
                model, _ = load_gguf(path, stage.dtype)
            else:
                where = locate(stage.model)
                check_can_roll_back(AutoConfig.from_pretrained(where, **ONLY_DATA), stage.model)
                check_no_pickle(where, stage.model)
                # None: safetensors where there are some, else a pickle.
                model = AutoModelForCausalLM.from_pretrained(where, dtype=DTYPES[stage.dtype], **ONLY_DATA,
                                                             use_safetensors=None if trusts_pickle() else True)
        except InputError:
            raise
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise _cannot_load(stage.model, error) from None
    check_can_roll_back(model.config, stage.model)
    # One core of a CPU is a matter of pinning, not of torch's.
    return model.to("cpu" if stage.core is not None else stage.device).eval()


def trusts_pickle() -> bool:
    return os.environ.get(TRUST_PICKLE) == "1"


def check_no_pickle(where: str, model: str) -> None:
    """Refuse a local folder whose only weights are a pickle, naming the file."""
    folder = Path(where)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if folder.is_dir() and pickles and not any(folder.glob("*.safetensors")) and not trusts_pickle():
        raise InputError(f"model {model!r}", f"must have its weights as safetensors or GGUF: {pickles[0]} is a pickle, "
                         "which may run any code as it is read", mend="if you trust who made it, add --trust-pickle")


def _cannot_load(model: str, error: Exception) -> InputError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return InputError(f"model {model!r}", f"cannot be loaded ({reason[:160]})", mend=(
        "give a local folder, a GGUF file, a Hugging Face id or a built-in name"))


def check_device(stage: StageSpec) -> None:
    """Raise InputError where a device, or the core that it names, is not there."""
    here = ["cpu", *(f"cpu:{i}" for i in available_cores()), *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if stage.device not in here and not (stage.device == "cuda" and torch.cuda.device_count()):
        raise InputError(f"stages[{stage.name}].device", f"must be one of {', '.join(here)}", stage.device)


def check_can_roll_back(config: Any, name: str) -> None:
    """Refuse a cache that cannot forget its newest tokens, naming the layer type."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and "full_attention" not in kinds:
        kinds.add("sliding_attention")
    if any(hasattr(config, key) for key in ("ssm_state_size", "state_size", "mamba_d_state", "conv_kernel")):
        kinds.add("recurrent")
    # What a config does not say, the model's class does: its state is not a cache that can be cut.
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._is_stateful:
        kinds.add("recurrent")
    if getattr(config, "is_encoder_decoder", False):
        kinds.add("encoder-decoder")
    bad = sorted(kinds - {"full_attention"})
    if bad:
        raise InputError(f"model {name!r}", f"must have a cache that can roll back; it has layers of type {bad[0]}",
                         mend="use a model whose layers all attend to everything")
