"""The part of the conformance kit that needs this distribution: the suite of server plugins."""

import sys

# Without this, a check that fails shows no values: pytest rewrites asserts of test files only.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite("treadle_server.testing.plugins")
