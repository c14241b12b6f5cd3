from tests.registry.dists import make_dist as make_dist
