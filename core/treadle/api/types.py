"""All types and protocols of the plugin interface. Importing it does not import torch."""

from treadle.api.attention import *  # noqa: F403
from treadle.api.cache import *  # noqa: F403
from treadle.api.communicators import *  # noqa: F403
from treadle.api.engine import *  # noqa: F403
from treadle.api.files import *  # noqa: F403
from treadle.api.matching import *  # noqa: F403
from treadle.api.models import *  # noqa: F403
from treadle.api.parsers import *  # noqa: F403
from treadle.api.stats import EngineStats as EngineStats
from treadle.api.step_types import EngineInfo as EngineInfo
from treadle.api.step_types import GrammarOutput as GrammarOutput
from treadle.api.step_types import ModelRunnerOutput as ModelRunnerOutput
from treadle.api.step_types import SchedulerOutput as SchedulerOutput
from treadle.api.structured_output import *  # noqa: F403
