"""What the families of published VLMs share: prompts, observations, checkpoint folders.

Legend: ``*`` batch dims, ``B`` rows, ``K`` cameras, ``s`` side of the network's image, ``S`` state,
``L`` prompt tokens.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import load_file
from tensordict import TensorDictBase
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from torchrl_vla import schema
from torchrl_vla.policies.deferred import (
    parameters_without_storage,
    stored_tensors,
    wait_for,
)
from torchrl_vla.policies.images import ImagePipeline, PixelScale
from torchrl_vla.policies.lora import LoraSettings, Policy, add_lora
from torchrl_vla.policies.policy import Precision
from torchrl_vla.policies.statistics import Normalizer
from torchrl_vla.policies.weights import load_weights

HEADS = "heads.safetensors"
"""Weights of ours that a published network has no place for."""
FETCHED = (".json", ".safetensors", ".model", ".txt", ".jinja")
"""Ends of the file names that a hub id's snapshot needs; no pickle among them."""
COPIED = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template",
          "processor", "preprocessor")  # fmt: skip
"""Beginnings of the file names that an export takes over."""
PAD = -1
"""Marks padding in prompt tables, because the pad token of some vocabularies is a real one too."""


def resolve_checkpoint(name: str | Path, ends: Sequence[str] = FETCHED) -> Path:
    """Return the folder of a checkpoint: a local one, or a hub id's snapshot.

    Args:
        name: folder or hub id.
        ends: of the file names that are fetched of a hub id.

    Raises:
        FileNotFoundError: neither a folder nor a hub id that can be had; one line names both ways.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(name), allow_patterns=[f"*{end}" for end in ends]))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"policy.checkpoint={name} is no local folder, and as a hub id it cannot be fetched "
            f"({type(error).__name__}); download it where there is a network (hf download {name} "
            "--local-dir FOLDER) and pass policy.checkpoint=FOLDER"
        ) from error


def load_network(model_class: Any, folder: Path, *, deferred: bool = False) -> Any:
    """Load a transformers network from a folder: float32, strictly, from safetensors only.

    Args:
        model_class: with ``from_pretrained``.
        folder: as ``save_pretrained`` writes it.
        deferred: leave the network without storage, checked against the files' headers, until
            :func:`~torchrl_vla.policies.deferred.fill`. An architecture whose tensors transformers
            converts (other than by name) is loaded whole nevertheless, with a warning.

    Raises:
        ValueError: keys are missing, left over or of another shape; the first are named.
    """
    if deferred:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True)
        with parameters_without_storage():
            make = getattr(model_class, "from_config", None) or model_class._from_config
            network = make(settings, dtype=torch.float32).eval()
        names = stored_names(network, folder)
        if names is not None:
            wait_for(network, folder, names)
            return network
        warnings.warn(
            f"transformers converts the tensors of {folder} while it loads them: every rank reads "
            "the whole network before it is sharded",
            stacklevel=2,
        )
    network, info = model_class.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    wrong = {kind: sorted(map(str, keys))[:4] for kind, keys in info.items() if keys}
    if wrong:
        raise ValueError(f"{folder} is not a whole {type(network).__name__} checkpoint: {wrong}")
    return network


def stored_names(network: Any, folder: Path) -> dict[str, str] | None:
    """Return the name in the folder's files of everything in ``network``'s state dict.

    Transformers renames tensors between files and modules; of a tied parameter the files hold one
    name. ``None`` if a tensor is made of others, such as experts that are stored one by one.

    Raises:
        ValueError: keys are missing, left over or of another shape; the first are named.
    """
    rules = get_model_conversion_mapping(network)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    own = network.state_dict(keep_vars=True)
    names: dict[str, str] = {}
    shapes, unknown = [], []
    for stored, value in stored_tensors(folder, values=False):
        name, converted = rename_source_key(
            stored, renamings, converters, network.base_model_prefix, own
        )
        if converted is not None:
            return None
        if name not in own:
            name = stored
        if name not in own or name in names:
            unknown.append(stored)
        elif own[name].shape != value.shape:
            shapes.append(f"{stored}: {tuple(value.shape)}, here {tuple(own[name].shape)}")
        else:
            names[name] = stored
    there = {id(own[name]) for name in names}
    missing = [name for name, value in own.items() if id(value) not in there]
    wrong = {"missing": missing[:4], "unexpected": unknown[:4], "shapes": shapes[:4]}
    if any(wrong.values()):
        raise ValueError(f"{folder} is not a whole {type(network).__name__} checkpoint: {wrong}")
    return names


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a checkpoint folder.

    Raises:
        FileNotFoundError: the folder holds none.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise FileNotFoundError(
            f"{folder} holds no tokenizer.json; copy the tokenizer files of its base model there"
        )
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def check_source(checkpoint: str | None, size: str | None) -> None:
    """Check that a policy is asked for either from a checkpoint or as a tiny random one.

    Raises:
        ValueError: both or neither are given, or the size is unknown.
    """
    if (checkpoint is None) == (size is None):
        raise ValueError(
            f"policy.checkpoint={checkpoint} and policy.size={size}: give exactly one of a "
            "checkpoint and size=tiny"
        )
    if size not in (None, "tiny"):
        raise ValueError(f"policy.size is {size!r}; use 'tiny', or null with a checkpoint")


def load_heads(policy: nn.Module, folder: Path) -> None:
    """Load what :func:`start_export` and its callers wrote beside a published network, if any.

    Raises:
        ValueError: the file names a parameter that ``policy`` lacks, or of another shape.
    """
    path = folder / HEADS
    if not path.is_file():
        return
    stored, own = load_file(path), policy.state_dict()
    wrong = [key for key in stored if key not in own or own[key].shape != stored[key].shape]
    if wrong:
        raise ValueError(f"{path} does not fit this policy: {wrong[:4]}; use the same policy.head")
    policy.load_state_dict(stored, strict=False)


def finish_policy(
    policy: Policy, checkpoint: str | None, weights: str | None, lora: LoraSettings | None
) -> Policy:
    """Load the heads of a checkpoint folder, then a weights file of ours, then inject adapters."""
    if checkpoint is not None:
        load_heads(policy, resolve_checkpoint(checkpoint))
    if weights is not None:
        load_weights(Path(weights), vocabulary=policy.model.vocabulary, **policy.parts())
    return policy if lora is None else add_lora(policy, lora)


def start_export(folder: Path, source: Path) -> None:
    """Make an empty checkpoint folder with the tokenizer and processor files of ``source``.

    Raises:
        FileExistsError: ``folder`` holds files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; export into a new folder")
    for path in sorted(source.iterdir()):
        if path.name.startswith(COPIED) and path.suffix in FETCHED:
            shutil.copyfile(path, folder / path.name)


def check_vocabulary(prompts: Sequence[Sequence[int]], size: int, folder: Path) -> None:
    """Check that a folder's tokenizer belongs to its network.

    Raises:
        ValueError: a token id is outside the network's vocabulary.
    """
    largest = max(max(ids) for ids in prompts)
    if largest >= size:
        raise ValueError(
            f"the tokenizer of {folder} gives id {largest}, the network's vocabulary has {size}: "
            "use the tokenizer files that belong to the network"
        )


def prompt_table(prompts: Sequence[Sequence[int]]) -> Tensor:
    """Stack token ids of different length, int64 ``[num_tasks, L]``, right-padded with ``PAD``.

    Raises:
        ValueError: there is no prompt, or one is empty.
    """
    if not prompts or not all(len(ids) for ids in prompts):
        raise ValueError("a prompt has no tokens; check the tokenizer and the prompt template")
    table = torch.full((len(prompts), max(map(len, prompts))), PAD, dtype=torch.int64)
    for row, ids in zip(table, prompts, strict=True):
        row[: len(ids)] = torch.tensor(list(ids))
    return table


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return the context that a network runs in, wherever a policy acts, learns or is evaluated.

    Raises:
        ValueError: unknown precision.
    """
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {precision!r}; use 'float32' or 'bfloat16'")
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


class PromptReader(nn.Module):
    """Reads the schema's observation for a published network: images, state, prompt tokens.

    Prompts are tokenised once per instruction, here at construction; a decision looks its row up.

    Args:
        model: the trunk, called as ``model(image, state, words, outputs)``.
        prompts: int64 ``[num_tasks, L]``, :func:`prompt_table`.
        image_size: ``s``.
        pipeline: from the camera's pixels to the network's, uint8 in and out.
        cameras: rows of the suite's camera axis that are read, in the model's order; None for all.
        state_normalizer: to the checkpoint's state units; None leaves SI units.
        precision: of the trunk's arithmetic; weights and outputs stay float32.
        vocabulary: words by id if the prompts are made of the suite's own words; empty if they come
            from a published tokenizer, which knows any.
        facts: where weights and statistics come from, for :meth:`describe`.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Tensor,
        *,
        image_size: int,
        pipeline: ImagePipeline | None = None,
        cameras: Sequence[int] | None = None,
        state_normalizer: Normalizer | None = None,
        precision: Precision = "float32",
        vocabulary: Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        autocast(precision, prompts.device)
        self.model, self.vocabulary, self.facts = model, tuple(vocabulary), dict(facts or {})
        self.image_size, self.precision = image_size, precision
        self.pipeline = ImagePipeline() if pipeline is None else pipeline
        self.cameras = None if cameras is None else list(cameras)
        self.state_normalizer = state_normalizer
        self.register_buffer("instruction_table", prompts, persistent=False)

    def forward(
        self, td: TensorDictBase, outputs: tuple[str, ...], **given: Any
    ) -> dict[str, Tensor]:
        """Run the trunk on ``td`` (any batch dims, none included); outputs keep those dims.

        ``given`` are further arguments of the trunk.
        """
        image, state = td.get(schema.IMAGE), td.get(schema.STATE)
        words = self.instruction_table[td.get(schema.TASK_ID).squeeze(-1)]
        dims, shape = td.batch_dims, td.batch_size
        image = image.reshape(-1, *image.shape[dims:])
        if self.cameras not in (None, list(range(image.shape[1]))):
            image = image[:, self.cameras]
        if self.state_normalizer is not None:
            state = self.state_normalizer.normalise(state)
        with autocast(self.precision, image.device):
            out = self.model(
                self.pipeline(image, self.image_size),
                state.reshape(-1, state.shape[-1]),
                words.reshape(-1, words.shape[-1]),
                outputs,
                **given,
            )
        return {key: value.reshape(*shape, *value.shape[1:]) for key, value in out.items()}

    def describe(self) -> dict[str, Any]:
        """Return what a result of this policy depends on besides its weights, as plain values."""
        images = self.pipeline.describe() | {"size": self.image_size, "cameras": self.cameras}
        return {"images": images, "precision": self.precision, **self.facts}


def read_pixel_scale(folder: Path) -> PixelScale:
    """Return what the checkpoint's image processor normalises with; 0.5 if it does not say."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        entry = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        entry = entry.get("image_processor", entry)
        if "image_mean" in entry:
            return PixelScale(tuple(entry["image_mean"]), tuple(entry["image_std"]))
    return PixelScale()
