from .op import logits_credit as logits_credit
