"""Every value and protocol that crosses the boundary between core and plugins.

Importing this module does not import torch.
"""

from treadle.api.attention import *  # noqa: F403
from treadle.api.cache import *  # noqa: F403
from treadle.api.engine import *  # noqa: F403
from treadle.api.files import *  # noqa: F403
from treadle.api.guided import *  # noqa: F403
from treadle.api.matching import *  # noqa: F403
from treadle.api.models import *  # noqa: F403
from treadle.api.parsers import *  # noqa: F403
from treadle.engine.plan import EngineFacts as EngineFacts
from treadle.engine.plan import StepEdits as StepEdits
from treadle.engine.plan import StepPlan as StepPlan
from treadle.engine.plan import StepResult as StepResult
from treadle.engine.stats import EngineStats as EngineStats
