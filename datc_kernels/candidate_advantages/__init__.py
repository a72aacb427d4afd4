from .op import candidate_advantages as candidate_advantages
