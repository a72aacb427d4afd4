from .diagnostics import effective_sample_ratio as effective_sample_ratio
from .diagnostics import predicted_gain as predicted_gain
from .op import allocate_weights as allocate_weights
