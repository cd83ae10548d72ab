"""From a config.json (its keys, never a family's name) to a Shape."""

from __future__ import annotations

from collections import Counter

from headstart.errors import ModelError
from headstart.formats.mtp_families import Layout, declared, find_family, num_experts
from headstart.formats.symbols import as_size, text_config
from headstart.models.base import with_sizes
from headstart.tools.plan.config_layers import Config, compressed, feed_forward, parts
from headstart.tools.plan.shape import MLP, Attention, Head, Layers, Shape

MOST_LAYERS = 4096
MOST_EXPERTS = 2**16


def shape_of(name: str, config: Config, *, weights: str = "bf16") -> Shape:
    """Raises ModelError naming a missing key, or a size that makes no sense."""
    config = with_sizes(text_config(config))
    _check(name, config)
    try:
        return _shape(name, config, weights)
    except KeyError as error:
        hint = "plan needs the sizes that a config.json names"
        raise ModelError(f"{name}: its config has no {error.args[0]}", hint) from error
    except StopIteration:
        raise ModelError(f"{name}: its config does not say how many experts a token takes") from None
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError) as error:
        raise ModelError(f"{name}: a size in its config is not a number: {error}") from error


def _check(name: str, config: Config) -> None:
    """Sizes are whole numbers from 1 on, within what can be; counts are bounded before anything is made of them."""
    bounds = {"num_hidden_layers": MOST_LAYERS, "num_layers": MOST_LAYERS, "num_attention_heads": 2**16}
    bounds |= {"hidden_size": 2**24, "vocab_size": 2**28}
    for key, most in bounds.items():
        if key in config and not 1 <= (as_size(config[key]) or 0) <= most:
            what = f"{name}: its config says {key} {config[key]!r}, which is no size"
            raise ModelError(what, f"a whole number from 1 to {most}")
    if num_experts(config) > MOST_EXPERTS:
        raise ModelError(f"{name}: its config names {num_experts(config)} experts, which is no size")


def _shape(name: str, config: Config, weights: str) -> Shape:
    layers = parts(config)
    groups = Counter(layers)
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    layout = find_family(config)
    modules = declared(config, layout).modules or (layout.released or 0 if layout else 0)
    mixer, feed = head_block(config, layers, layout)
    head = Head(
        kind="mtp",
        hidden=hidden,
        vocab=vocab,
        layers=(Layers(1, mixer, feed),),
        projection=2 * hidden * hidden,
        modules=max(modules, 1),
        assumed=not modules,
    )
    per_layer = int(config.get("hidden_size_per_layer_input") or 0)
    length = as_size(config.get("max_position_embeddings"))
    return Shape(
        name=name,
        hidden=hidden,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", False)),
        layers=tuple(Layers(count, mixer, feed) for (mixer, feed), count in groups.items()),
        head=head,
        weights=weights,
        max_length=length or None,
        looked_up=per_layer * len(layers) * int(config.get("vocab_size_per_layer_input") or vocab) if per_layer else 0,
    )


def head_block(config: Config, layers: list[tuple[Attention, MLP]], layout: Layout | None) -> tuple[Attention, MLP]:
    """One block of an MTP module. It attends as the last full layer does (where the cache is compressed, or its family
    says so, in a window) and feeds forward as the last layer, or as its family's tensors say."""
    mixers = [mixer for mixer, _ in layers if mixer.weights]
    feed = next(feed for _, feed in reversed(layers) if feed.weights)
    if layout is not None and feed.experts and not has_experts(config, layout):
        feed = feed_forward(config, dense=True)
    if config.get("compress_ratios"):
        return compressed(config, 0), feed
    windows = layout is not None and layout.rope == "sliding"
    fitting = [mixer for mixer in mixers if not mixer.state and bool(mixer.window) == windows]
    # the last of them, but with an indexer where some have one
    return max(reversed(fitting or mixers), key=lambda mixer: mixer.index_width), feed


def has_experts(config: Config, layout: Layout) -> bool:
    """Do the tensors of a family's modules have experts?"""
    names = [slot.name for slot in layout.expected(layout.sizes({**config, "n_routed_experts": 1}), 0, 0, ())]
    return any(".experts." in name for name in names)
