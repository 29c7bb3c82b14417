"""Backends offer; the best offer wins, and a refusal says why."""

from __future__ import annotations

import pytest

from treadle.api.kinds import ATTENTION_BACKENDS, KERNEL_OPS
from treadle.api.types import AttentionRequest, DeviceInfo, KernelRequest
from treadle.errors import ConfigError, PluginConflictError, PluginLoadError, PluginNotFoundError
from treadle_worker_kit.attention import attention_offer

CPU = DeviceInfo("cpu")
REQUEST = AttentionRequest(
    CPU, "float32", "float32", head_size=80, num_heads=8, num_kv_heads=8, scale=0.1
)

OFFER = """
    from treadle.api import impl, types as t

    @impl
    def treadle_attention_backend(request, options):
        return t.AttentionOffer({name!r}, options.get("score", {score}), create=dict)

    @impl
    def treadle_kernel_op(op, request):
        return t.KernelOffer({name!r}, {score}, load=dict) if op == "rope" else None
"""
REFUSE = """
    from treadle.api import impl, types as t

    @impl
    def treadle_attention_backend(request):
        return t.Refusal({name!r}, (f"head size {{request.head_size}} is not supported", "needs CUDA"))
"""


def backend(site, name, template=OFFER, score=10):
    module = f"{name}_backend"
    groups = {"treadle.attention_backends": {name: module}, "treadle.kernel_ops": {name: module}}
    site.install(module.replace("_", "-"), groups, template.format(name=name, score=score))


def names(offers):
    return [offer.name for offer in offers]


def test_the_highest_score_wins_and_ties_go_by_name(site):
    backend(site, "slow", score=1)
    backend(site, "zeta", score=50)
    backend(site, "alpha", score=50)
    backend(site, "flash", REFUSE)
    plugins = site.plugin_manager()
    assert attention_offer(plugins, REQUEST).name == "alpha"
    offers, refusals = plugins.offers(ATTENTION_BACKENDS, request=REQUEST)
    assert (names(offers), names(refusals)) == (["alpha", "zeta", "slow"], ["flash"])


def test_when_nobody_offers_every_refusal_is_told(site):
    backend(site, "flash", REFUSE)
    backend(site, "broken", "import missing_kernel")
    with pytest.raises(PluginNotFoundError) as error:
        attention_offer(site.plugin_manager(), REQUEST)
    text = str(error.value)
    assert "no attention backend can serve this model:" in text
    assert "flash: head size 80 is not supported; needs CUDA" in text
    assert "broken: attention_backends:broken from broken-backend 1.0 failed to load" in text


def test_without_a_backend_the_error_says_what_to_install(site):
    with pytest.raises(PluginNotFoundError) as error:
        attention_offer(site.plugin_manager(), REQUEST)
    first, second = str(error.value).splitlines()
    assert first == "no attention backend can serve this model: none is installed"
    assert "treadle-sdpa" in second and "'./plugins/backends/attention/sdpa'" in second


def test_a_pin_beats_the_score(site):
    backend(site, "slow", score=1)
    backend(site, "fast", score=50)
    assert attention_offer(site.plugin_manager(), REQUEST, "slow").name == "slow"


def test_a_pinned_backend_that_refuses(site):
    backend(site, "slow", score=1)
    backend(site, "flash", REFUSE)
    with pytest.raises(ConfigError) as error:
        attention_offer(site.plugin_manager(), REQUEST, "flash")
    assert str(error.value) == (
        "attention_backend is 'flash', which cannot serve this model: head size 80 is not supported; "
        "needs CUDA; backends that can: slow"
    )


def test_a_pin_to_an_unknown_backend(site):
    backend(site, "slow")
    with pytest.raises(PluginNotFoundError, match=r"attention_backends:flosh \(known: slow\)"):
        attention_offer(site.plugin_manager(), REQUEST, "flosh")


def test_broken_and_contested_backends_do_not_stop_the_others(site):
    backend(site, "good")
    backend(site, "broken", "import missing_kernel")
    site.install(
        "twin-a",
        {"treadle.attention_backends": {"twin": "twin_a"}},
        OFFER.format(name="twin", score=99),
    )
    site.install(
        "twin-b",
        {"treadle.attention_backends": {"twin": "twin_b"}},
        OFFER.format(name="twin", score=99),
    )
    plugins = site.plugin_manager()
    offers, refusals = plugins.offers(ATTENTION_BACKENDS, request=REQUEST)
    assert (names(offers), names(refusals)) == (["good"], ["broken", "twin"])
    with pytest.raises(PluginConflictError):
        attention_offer(plugins, REQUEST, "twin")
    with pytest.raises(PluginLoadError, match="missing_kernel"):
        attention_offer(plugins, REQUEST, "broken")


def test_each_backend_gets_its_own_options(site):
    backend(site, "slow", score=1)
    backend(site, "fast", score=50)
    plugins = site.plugin_manager(plugin_options={"attention_backends:slow": {"score": 70}})
    assert attention_offer(plugins, REQUEST).name == "slow"


def test_an_answer_that_is_no_bid(site):
    backend(
        site,
        "odd",
        "from treadle.api import impl\n\n@impl\ndef treadle_attention_backend(request):\n    return 7\n",
    )
    _, [refusal] = site.plugin_manager().offers(ATTENTION_BACKENDS, request=REQUEST)
    assert "answered treadle_attention_backend with 7" in refusal.reasons[0]


def test_kernels(site):
    backend(site, "slow", score=1)
    backend(site, "fast", score=50)
    plugins, request = site.plugin_manager(), KernelRequest(CPU, "float32", {"head": 64})
    offer = plugins.best_offer(KERNEL_OPS, op="rope", request=request)
    assert offer is not None and offer.name == "fast"
    assert plugins.best_offer(KERNEL_OPS, op="rms_norm", request=request) is None
