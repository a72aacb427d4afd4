from .op import linear_credit as linear_credit
