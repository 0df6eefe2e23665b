"""How long does each part of a step take? Pure: measurements in, a performance model with error bars out."""

from moesaic.costs.book import CostBook as CostBook
from moesaic.costs.fit import CostFit as CostFit
from moesaic.costs.fit import fitted as fitted
from moesaic.costs.fit import merged as merged
from moesaic.costs.random_choice import RandomChoice as RandomChoice
