"""What one layer knows beside its keys and values, and how a step reads a part of them by it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .anchor_config import AnchorConfig
from .anchor_index import AnchorIndex
from .anchors import builder_of
from .audit import audit_step
from .block_choice import CachedTokens, choose_pieces
from .certificate import read_until_certain
from .patches.readings import BlockReading, Reading
from .perspectives import Perspectives
from .retrieval_report import LayerRecord
from .selection import StepPlan
from .token_reading import (
    Selection,
    blocks_to_read,
    reading_of,
    select_tokens,
    tokens_attended,
    with_skipped_means,
)


class BlockReader:
    """Perspectives, index and the selection in use of one layer.

    All of it is derived state. Appended tokens extend the index; whatever else changes the keys
    either changes the index alike or drops it, and the next sparse step builds it anew.
    """

    def __init__(self, config: AnchorConfig) -> None:
        self.config = config
        self.perspectives: Perspectives | None = None
        if builder_of(config.builder).query_dependent:
            by_query_head = config.anchor_heads == "query"
            self.perspectives = Perspectives(config.anchors_per_head, by_query_head)
        self.index: AnchorIndex | None = None
        self.selection: Selection | None = None
        self._serves = 0  # steps that the selection is still to be used for

    def observe(self, query: torch.Tensor, length: int) -> None:
        """Remember queries ``[B, H, T, D]`` up to position ``length - 1``."""
        if self.perspectives is not None:
            self.perspectives.observe(query, length)

    def take_queries_from(self, other: BlockReader) -> None:
        """Learn perspectives from the queries that another layer has kept, if both need any."""
        if other.perspectives is not None and self.perspectives is not None:
            self.perspectives.recent.load_state_dict(other.perspectives.recent.state_dict())

    def refresh_perspectives(self, tokens: CachedTokens) -> None:
        """Learn perspectives where it is time. To be called at every decoding step, dense ones
        too: what is learned must not depend on when a row of a batch first grows beyond its
        budget."""
        if self.perspectives is not None:
            n_kv_heads = tokens.keys.shape[1]
            if self.perspectives.refresh(tokens.visible, n_kv_heads, tokens.scaling):
                self.index = None

    def read(
        self,
        tokens: CachedTokens,
        plan: StepPlan,
        mask: torch.Tensor | None,
        record: LayerRecord,
        is_first_call: bool,
    ) -> Reading | BlockReading | None:
        """Choose blocks, or use the last choice again, and say where their tokens are.

        Args:
            tokens: the cache, and the query that reads it.
            plan: what it may read.
            mask: the mask of the whole cache, if there is one.
            record: where the step is counted.
            is_first_call: False if attention is called a second time for the same token.

        Returns:
            None when everything has to be read.
        """
        self._bring_index_up_to(plan, tokens)
        config, length = self.config, tokens.keys.length
        selection = self._serving_again(tokens) if is_first_call else None
        if selection is not None:
            choice, plan = selection.choice, selection.plan
        else:
            choice = choose_pieces(self.index, tokens, plan)
            if config.tolerance is not None:
                choice, skipped = read_until_certain(self.index, tokens, plan, choice)
                record.skipped_share = max(record.skipped_share or 0.0, float(skipped.max()))
                if choice is None:
                    record.dense("the tolerance could only be proven by reading everything")
                    return None
        counts = tokens_attended(choice, plan, config)
        record.sparse(tuple(count + length - plan.length for count in counts))
        if len(plan.attended) < len(plan.rows):
            record.reasons["rows of a batch that alone would be dense read everything"] += 1

        audited = config.audit_every and record.sparse_steps % config.audit_every == 0
        in_place = not (audited or config.skipped or config.reselect_every > 1)
        if in_place and tokens.keys.is_read_in_place and (mask is None or mask.dtype == torch.bool):

            def gather() -> Reading:
                return reading_of(select_tokens(choice, tokens, plan), tokens, mask)

            return blocks_to_read(choice, tokens, plan, gather)
        if selection is None:
            selection = select_tokens(choice, tokens, plan)
            if is_first_call and config.reselect_every > 1:
                self.selection, self._serves = selection, config.reselect_every - 1
        reading = reading_of(selection, tokens, mask)
        if config.skipped == "mean":
            reading = with_skipped_means(reading, self.index, choice, plan, tokens.query)
        if audited:
            audit = audit_step(selection, tokens, config)
            record.audits.append(audit)
            reading = reading._replace(compare=audit.compare)
        return reading

    def _serving_again(self, tokens: CachedTokens) -> Selection | None:
        """The last selection with the newest token, if it is to serve this step, too."""
        last, length = self.selection, tokens.keys.length
        if last is None or not self._serves or last.length != length - 1:
            return None
        self._serves -= 1
        self.selection = last.grown_to(length, tokens.visible)
        return self.selection

    def _bring_index_up_to(self, plan: StepPlan, tokens: CachedTokens) -> None:
        paddings = tuple(row.padding for row in plan.rows)
        if self.index is not None and not self.index.agrees_with(tokens.visible):
            self.index = None
        if self.index is None or self.index.paddings != paddings:
            centres = None if self.perspectives is None else self.perspectives.centres
            self.index = AnchorIndex(self.config, centres, paddings, tokens.scaling)
        if self.index.blocks < plan.last_block:
            self.index.extend(tokens.keys, tokens.values, tokens.visible)

    def keys_changed(self) -> None:
        """Drop what followed from the old keys."""
        self.index = self.selection = None

    def truncate(self, length: int) -> None:
        """Forget what came after the first ``length`` tokens."""
        self.selection = None
        if self.perspectives is not None:
            self.perspectives.truncate(length)
        if self.index is not None:
            self.index.truncate(length)

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension or the device."""
        for part in (self.perspectives, self.index):
            if part is not None:
                part.map_(change)
        if self.selection is not None:
            self.selection = self.selection.map(change)

    @property
    def nbytes(self) -> int:
        """Bytes of anchors, sketches, and what else is kept to choose blocks."""
        return sum(part.nbytes for part in (self.perspectives, self.index) if part is not None)
