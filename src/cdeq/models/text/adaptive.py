"""Word vectors that are short for rare words, one table for reading and for scoring.

Shapes: D width, V vocabulary, T tail clusters, N positions with a target in one cluster.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.models.arguments import arguments_of
from cdeq.placement import in_single


class AdaptiveVocabulary(nn.Module):
    """p(w | h) = p(cluster of w | h) p(w | cluster, h), with logits e_w . (P_i^T h) + b_w inside cluster i.

    The adaptive softmax of Grave et al. (2017), tied to the adaptive input of Baevski & Auli (2019),
    sqrt(D) P_i e_w. Words are ordered by falling frequency. Those below `cutoffs[0]` share one softmax with the T
    tail clusters, and have vectors of `width` and P = I; the vectors of tail cluster i = 1, 2, ... have
    width // divisor**i. Without cutoffs this is a plain tied embedding. torch.nn.AdaptiveLogSoftmaxWithLoss cannot
    share its weights with an embedding.
    """

    def __init__(
        self, *, vocabulary: int, width: int, cutoffs: tuple[int, ...] = (), divisor: int = 4
    ):
        super().__init__()
        cutoffs = tuple(cutoffs)
        self.config = arguments_of(locals())
        edges = (0, *cutoffs, vocabulary)
        if any(low >= high for low, high in pairwise(edges)):
            raise ValueError(
                f"cutoffs must be positive, increasing and below the vocabulary of {vocabulary}, not {cutoffs}"
            )
        if width < 1 or divisor < 1:
            raise ValueError(f"width and divisor must be at least 1, not {width} and {divisor}")
        widths = [width // divisor**i for i in range(len(edges) - 1)]
        if not widths[-1]:
            raise ValueError(
                f"clusters of widths {widths}: a vector needs at least one number; "
                "take a larger width, a smaller divisor or fewer cutoffs"
            )
        self.vocabulary, self.width, self.edges = vocabulary, width, edges
        sizes = [high - low for low, high in pairwise(edges)]
        # Features of unit variance then give logits of unit variance, and words unit-variance inputs.
        self.vectors = nn.ParameterList(
            torch.randn(size, short) * width**-0.5
            for size, short in zip(sizes, widths, strict=True)
        )
        self.projections = nn.ParameterList(
            torch.randn(width, short) * short**-0.5 for short in widths[1:]
        )
        self.word_bias = nn.Parameter(torch.zeros(vocabulary))
        self.cluster_vectors: nn.Parameter | None = None
        self.cluster_bias: nn.Parameter | None = None
        if cutoffs:
            self.cluster_vectors = nn.Parameter(torch.zeros(len(cutoffs), width))
            # A cluster as likely as all its words: training starts with all words about equally likely.
            self.cluster_bias = nn.Parameter(torch.tensor(sizes[1:]).to(torch.float).log())

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (...) to vectors (..., D), scaled by sqrt(D)."""
        # Every cluster answers for every token, and the right answer is kept: the projections are small, and no
        # shape depends on the data. The first cluster clamps no negative token and the last none beyond the
        # vocabulary, so that the lookup refuses them.
        last = len(self.projections)
        inside = tokens.clamp(max=self.edges[1] - 1) if last else tokens
        embedded = F.embedding(inside, self.vectors[0])
        for i, projection in enumerate(self.projections, start=1):
            low, high = self.edges[i], self.edges[i + 1]
            inside = tokens.clamp(min=low, max=None if i == last else high - 1) - low
            projected = F.embedding(inside, self.vectors[i]) @ projection.T
            embedded = torch.where((tokens >= low)[..., None], projected, embedded)
        return embedded * self.width**0.5

    def embed_one(self, token: int) -> Tensor:
        """The vector (D,) that `embed` gives a single token, by its own cluster alone."""
        if not 0 <= token < self.vocabulary:
            raise IndexError(f"token {token} is not in a vocabulary of {self.vocabulary}")
        i = bisect_right(self.edges, token) - 1
        vector = self.vectors[i][token - self.edges[i]]
        if i:
            vector = self.projections[i - 1] @ vector
        return vector * self.width**0.5

    def nll(self, features: Tensor, targets: Tensor) -> Tensor:
        """-log p(target | features), natural logarithm, (...); 0 where the target is negative.

        Features (..., D), targets (...). A tail cluster is computed only where a target lies in it.
        """
        if features.shape != (*targets.shape, self.width):
            raise ValueError(
                f"features must be targets' shape {tuple(targets.shape)} and {self.width} more, "
                f"not {tuple(features.shape)}"
            )
        h, words = features.reshape(-1, self.width), targets.reshape(-1)
        head_words = words.clamp(min=-1)
        for i in range(len(self.projections)):
            head_words = head_words.where(words < self.edges[i + 1], self.edges[1] + i)
        loss = F.cross_entropy(self._head(h), head_words, ignore_index=-1, reduction="none")
        last = len(self.projections)
        for i in range(1, last + 1):
            low, high = self.edges[i], self.edges[i + 1]
            # The last cluster takes all beyond it, so that words outside the vocabulary are refused.
            member = words >= low if i == last else (words >= low) & (words < high)
            positions = member.nonzero().squeeze(-1)  # (N,)
            if len(positions):
                inner = self._tail(i, h.index_select(0, positions))
                within = F.cross_entropy(inner, words[positions] - low, reduction="none")
                loss = loss.index_add(0, positions, within)
        return loss.view(targets.shape)

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """The mean of `nll` over the targets that are not negative; 0 where there is none."""
        return self.nll(features, targets).sum() / (targets >= 0).sum().clamp_min(1)

    def log_probabilities(self, features: Tensor) -> Tensor:
        """Features (..., D) to the logarithm of every word's probability, (..., V)."""
        head = self._head(features).log_softmax(dim=-1)
        frequent, clusters = head.split((self.edges[1], len(self.projections)), dim=-1)
        tails = [
            self._tail(i, features).log_softmax(dim=-1) + clusters[..., i - 1, None]
            for i in range(1, len(self.projections) + 1)
        ]
        return torch.cat((frequent, *tails), dim=-1)

    def scorer(self) -> WordScorer:
        """`log_probabilities` of one position after another, with the weights as they are now, in less time."""
        return WordScorer(self)

    def _head(self, h: Tensor) -> Tensor:
        """Logits of the frequent words and the tail clusters, (..., cutoffs[0] + T)."""
        logits = F.linear(h, self.vectors[0], self.word_bias[: self.edges[1]])
        if self.cluster_vectors is None:
            return in_single(logits)
        # Joined here, and not the weights, which are longer where there are few positions.
        clusters = F.linear(h, self.cluster_vectors, self.cluster_bias)
        return in_single(torch.cat((logits, clusters), dim=-1))

    def _tail(self, i: int, h: Tensor) -> Tensor:
        """Logits of the words of tail cluster i."""
        bias = self.word_bias[self.edges[i] : self.edges[i + 1]]
        return in_single(F.linear(h @ self.projections[i - 1], self.vectors[i], bias))


class WordScorer:
    """Features (D,) to the logarithm of every word's probability, (V,): a snapshot of a vocabulary, laid out for that.

    Vectors of frequent words, clusters and projections are one matrix. All are stored by feature, not by word: the
    vectors of rare words are too short for a product that goes from word to word.
    """

    @torch.no_grad()
    def __init__(self, words: AdaptiveVocabulary):
        widths = [projection.shape[1] for projection in words.projections]
        first, clusters = words.edges[1], len(widths)
        joined = [words.vectors[0], *(projection.T for projection in words.projections)]
        biases = [words.word_bias[:first], words.word_bias.new_zeros(sum(widths))]
        if words.cluster_vectors is not None and words.cluster_bias is not None:
            joined.insert(1, words.cluster_vectors)
            biases.insert(1, words.cluster_bias)
        self.bias, self.table = torch.cat(biases), _by_feature(torch.cat(joined))
        self.sizes, self.head_sizes = (first + clusters, *widths), (first, *[1] * clusters)
        self.tails = [
            (words.word_bias[low:high].clone(), _by_feature(vectors))
            for (low, high), vectors in zip(
                pairwise(words.edges[1:]), words.vectors[1:], strict=True
            )
        ]

    @torch.no_grad()
    def __call__(self, h: Tensor) -> Tensor:
        head, *short = torch.addmv(self.bias, self.table, h).split(self.sizes)
        frequent, *clusters = head.log_softmax(0).split(self.head_sizes)
        tails = [
            torch.addmv(bias, vectors, inner).log_softmax(0).add_(cluster)
            for (bias, vectors), inner, cluster in zip(self.tails, short, clusters, strict=True)
        ]
        return torch.cat((frequent, *tails))


def _by_feature(vectors: Tensor) -> Tensor:
    """The same matrix (N, E), each feature of all words in one stretch of memory."""
    return vectors.T.clone(memory_format=torch.contiguous_format).T
