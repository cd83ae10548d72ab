"""A second model of the same vocabulary drafts token by token; its keys share the block tables of the trunk."""

import os
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Self

from headstart.core import Draft, Rows, Sequence
from headstart.drafters.base import Drafter, DraftRequest, TargetModel
from headstart.errors import UsageError
from headstart.formats import open_checkpoint
from headstart.layers.network import FORWARD, DecoderNetwork
from headstart.models.tensors import load_decoder

PATH = "ACME_SECOND_MODEL"


class AcmeSecond(Drafter):
    method = "acme_second"

    def __init__(self, target: TargetModel, network: DecoderNetwork) -> None:
        self.runner, self.budget = target.runner, target.token_budget
        self.network = target.runner.open(network)

    @classmethod
    def attach(cls, target: TargetModel) -> Self:
        loaded = load_decoder(open_checkpoint(Path(os.environ[PATH])), target.backend)
        if loaded.config.vocab_size != target.config.vocab_size:
            raise UsageError(f"{PATH} is a model of {loaded.config.vocab_size} tokens, not {target.config.vocab_size}")
        return cls(target, DecoderNetwork(loaded.decoder))

    def num_uncached(self, sequence: Sequence) -> int:
        return max(len(sequence.tokens) - 1 - self.runner.filled(self.network, sequence), 0)

    def propose(self, requests: Seq[DraftRequest]) -> None:
        for sequence in [request.sequence for request in requests]:
            while (rest := self.num_uncached(sequence)) > 0:
                start = self.runner.filled(self.network, sequence)
                rows = [Rows(sequence, start, sequence.tokens[start : start + min(rest, self.budget)], 0)]
                self.runner.run(self.network, FORWARD, rows)
                self.runner.fill(self.network, rows)
        growing = list(requests)
        drafts = {request.sequence: Draft(method=self.method) for request in requests}
        while growing:
            rows, entries = [], []
            for request in growing:
                known, tokens = request.sequence.tokens, drafts[request.sequence].tokens
                rows.append(Rows(request.sequence, len(known) - 1 + len(tokens), [[*known[-1:], *tokens][-1]], 1))
                entries.append((request.sequence, len(known) + len(tokens), list(tokens)))
            drawn = self.runner.draw(self.runner.run(self.network, FORWARD, rows)["logits"], entries).tokens.tolist()
            for request, token in zip(growing, drawn, strict=True):
                if token >= 0:
                    drafts[request.sequence].tokens.append(token)
            growing = [
                request
                for request, token in zip(growing, drawn, strict=True)
                if token >= 0 and len(drafts[request.sequence].tokens) < request.depth
            ]
        for sequence, draft in drafts.items():
            sequence.draft = draft


DRAFTER = AcmeSecond
