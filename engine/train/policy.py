"""The model that is trained: transformers' layers over packed segments, through our attention, LoRA and head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.recipe import Full, Lora
from engine.train.full import FullWeights, match_frozen
from engine.train.lora import Adapter, LoraLinear, add_lora, match_targets
from kernels.attention import register_attention
from kernels.layout import Layout
from kernels.lm_head import LossOfRows, token_logprobs, token_loss

ATTENTION = "rlvr"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy:
    """A causal language model, what of it is trained, and its forward over packed segments.

    trained: the adapter, or the weights themselves. shares_prefixes: whether segments may have one (a layer with a
    recurrent state reads its tokens in a row, so a prompt cannot stand once for several completions).
    """

    def __init__(
        self,
        model: Path | PreTrainedModel,
        *,
        dtype: str,
        device: str,
        how: Lora | Full,
        seed: int,
        keep_base: bool = False,
        checkpointing: bool = False,
        sharded: bool = False,
    ) -> None:
        """model: a folder in transformers' format, or a model made with `ATTENTION`. keep_base: where the weights are
        trained, hold a copy of them for `base_model`. sharded: each trainer holds its part of every layer's frozen
        weights and gathers a layer whole for as long as it computes it (FSDP2); all trainers must then run as many
        forwards and backwards.

        Raises LookupError for a LoRA target or a frozen parameter that the model does not have.
        """
        register_attention(ATTENTION)
        loaded: Any = _load(model, dtype) if isinstance(model, Path) else model
        self.model = loaded if sharded or loaded.device == torch.device(device) else loaded.to(device)
        self.model.eval()
        self.device = torch.device(device)
        self.shares_prefixes = not self.model._is_stateful
        self.trained: Adapter | FullWeights
        if isinstance(how, Lora):
            self.trained = add_lora(self.model, how.targets, rank=how.rank, scale=how.scale, seed=seed)
        else:
            self.trained = FullWeights(self.model, how.freeze, keep_base=keep_base)
        if sharded:
            self.model = _shard(self.model, set(self.trained.parameters)).to(device)
        if checkpointing:
            for layer in self.model.model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    @property
    def adapter(self) -> Adapter:
        """The LoRA. Raises TypeError where the weights themselves are trained."""
        if not isinstance(self.trained, Adapter):
            raise TypeError("this policy has no adapter: its weights themselves are trained")
        return self.trained

    @property
    def head(self) -> torch.Tensor:
        """The output projection `[vocab, hidden]` without LoRA; the embedding where the two are tied."""
        module = self.model.get_output_embeddings()
        weight: torch.Tensor = (module.base if isinstance(module, LoraLinear) else module).weight
        return weight

    @property
    def context_cost(self) -> float:
        """What a token of context adds to a token's work, over the work of the token itself.

        A layer's products take about 24 hidden^2 operations a token, its attention 4 hidden a token of context.
        """
        return 1 / (6 * self.head.shape[1])

    @property
    def _head_lora(self) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        return self.trained.head_factors() if isinstance(self.trained, Adapter) else None

    def logprobs(
        self, state: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy `[N]` of targets `[N]` after the states `[N, hidden]`; see `token_logprobs`."""
        return token_logprobs(state, self.head, targets, temperature=temperature, lora=self._head_lora)

    def loss(
        self, state: torch.Tensor, targets: torch.Tensor, loss_of_rows: LossOfRows, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A token-level loss with its log-probs and entropies; see `token_loss`."""
        return token_loss(state, self.head, targets, loss_of_rows, temperature=temperature, lora=self._head_lora)

    def hidden(self, input_ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Last hidden states `[tokens, hidden]` of packed segments `[tokens]`.

        Raises ValueError for a prefix where the model cannot share one.
        """
        if self.shares_prefixes:
            return self._decode(input_ids[None], layout.positions().to(self.device)[None], layout)[0]
        if any(prefix >= 0 for prefix in layout.prefixes):
            raise ValueError(f"layout.prefixes: {type(self.model).__name__} has a recurrent state, it shares no prefix")
        # Rows of a batch, short ones filled up behind their end, where nothing that counts can see it.
        rows, longest = layout.n_segments, max(layout.lengths)
        own = torch.tensor([s * longest + i for s, n in enumerate(layout.lengths) for i in range(n)])
        own = own.to(self.device)
        padded = input_ids.new_zeros(rows * longest).index_copy(0, own, input_ids).view(rows, longest)
        positions = torch.arange(longest, device=self.device).expand(rows, -1)
        state = self._decode(padded, positions, Layout.from_lengths([longest] * rows, [-1] * rows))
        return state.flatten(0, 1).index_select(0, own)

    def _decode(self, input_ids: torch.Tensor, positions: torch.Tensor, layout: Layout) -> torch.Tensor:
        decoder: nn.Module = self.model.model
        out = decoder(input_ids=input_ids, position_ids=positions, use_cache=False, layout=layout)
        state: torch.Tensor = out.last_hidden_state
        return state

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """The model as it was before training, for as long as the context lasts."""
        with self.trained.disabled():
            yield

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-prob of every token but the first, at temperature 1."""
        ids = torch.tensor(token_ids, device=self.device)
        state = self.hidden(ids[:-1], Layout((0, len(token_ids) - 1), (-1,)))
        logprobs, _ = self.logprobs(state, ids[1:])
        return tuple(logprobs.tolist())


def _load(model_dir: Path, dtype: str) -> Any:
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=DTYPES[dtype], attn_implementation=ATTENTION, local_files_only=True
    )


def _shard(model: Any, whole: set[nn.Parameter]) -> Any:
    """Each layer's parameters but those in `whole` are split over all ranks; embedding, head and norm stay whole."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, ignored_params=whole)
    return model


def trained_names(model_dir: Path, how: Lora | Full) -> list[str]:
    """Layers that get LoRA, or parameters that are trained, from the model's configuration alone; no weight is loaded.

    Raises LookupError for a LoRA target or a frozen parameter that the model does not have.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir, local_files_only=True))
    if isinstance(how, Lora):
        return match_targets(model, how.targets)
    names = [name for name, _ in model.named_parameters()]
    frozen = match_frozen(names, how.freeze)
    return [name for name in names if name not in frozen]
