"""How many workers of each kind does the traffic need, and when do they come and go? Pure decisions."""

from moesaic.scaling.candidates import cheapest as cheapest
from moesaic.scaling.candidates import shape_cost as shape_cost
from moesaic.scaling.decide import Scaler as Scaler
from moesaic.scaling.decide import grows as grows
from moesaic.scaling.demand import recent_demand as recent_demand
from moesaic.scaling.demand import reported_arrivals as reported_arrivals
from moesaic.scaling.replay import forecast as forecast
from moesaic.scaling.serving_times import ServingTimes as ServingTimes
