"""The studies of the lab, in the order in which `baton bench` lists them."""

from bench.engine.run import EngineStudy
from bench.hostile.study import HostileStudy
from bench.lab.batches.study import BatchesStudy
from bench.lab.elastic import ElasticStudy
from bench.lab.elastic_live import ElasticLiveStudy
from bench.lab.experiment import Experiment
from bench.lab.fluid.study import FluidStudy
from bench.lab.gateway.study import GatewayStudy
from bench.lab.interference import InterferenceStudy
from bench.lab.kv.study import KvStudy
from bench.lab.moves import MovesStudy
from bench.lab.router.study import RouterStudy
from bench.lab.speculate.study import SpeculateStudy
from bench.lab.store.study import StoreStudy
from bench.lab.validation.study import ValidationStudy
from bench.quality.study import QualityStudy

STUDIES: tuple[type[Experiment], ...] = (
    EngineStudy,
    KvStudy,
    StoreStudy,
    BatchesStudy,
    SpeculateStudy,
    GatewayStudy,
    RouterStudy,
    InterferenceStudy,
    FluidStudy,
    ElasticStudy,
    ElasticLiveStudy,
    MovesStudy,
    ValidationStudy,
    HostileStudy,
    QualityStudy,
)
