"""Plugins that nobody trusts, in processes that can be killed: ``--isolate KIND:KEY``.

``plugin`` is what the plugin manager gets in place of the plugin. Its hooks return proxies, made from
the protocols of the kinds, which send each call to a child (``process``). The child (``child``)
imports the plugin and calls it. ``wire`` is what travels between the two.
"""
