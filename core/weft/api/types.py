"""Every value and protocol that crosses the boundary between core and plugins.

Importing this module does not import torch.
"""

from weft.api.attention import *  # noqa: F403
from weft.api.cache import *  # noqa: F403
from weft.api.engine import *  # noqa: F403
from weft.api.files import *  # noqa: F403
from weft.api.guided import *  # noqa: F403
from weft.api.matching import *  # noqa: F403
from weft.api.models import *  # noqa: F403
from weft.api.parsers import *  # noqa: F403
from weft.engine.plan import EngineFacts as EngineFacts
from weft.engine.plan import StepEdits as StepEdits
from weft.engine.plan import StepPlan as StepPlan
from weft.engine.plan import StepResult as StepResult
from weft.engine.stats import EngineStats as EngineStats
