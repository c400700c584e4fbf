"""A handful of what tests/corners/test_kinds.py and test_architectures.py try: the models that users have most"""
import sys
from pathlib import Path
import pytest
from kinds import controls,kinds,verdict
sys.path.insert(0, str(Path(__file__).resolve().parents[2]/'benchmarks'))
proved = pytest.importorskip('proved', reason='needs fastai with vision, text and tabular')

odd = """hook_fills_a_dict averaged_weights if_requires_grad dropout_of_two_views function_of_autograd similarities
random_partners layerdrop_by_torch normal_of_some_columns""".split()
right = 'dropout_between_norms attention counter rows_that_are_kept views_side_by_side'.split()

@pytest.mark.parametrize('name', odd)
def test_exact_or_refused(name):
    v,what = verdict(kinds[name], 'exact')
    assert v in ('exact','refused'), (v,what)

@pytest.mark.parametrize('name', right)
def test_what_is_right_is_not_refused(name):
    for way in controls[name].ways:
        v,what = verdict(controls[name], way)
        assert v=='exact', (way,v,what)

few = [('resnet18','exact'), *[('tabular_learner',w) for w in proved.ways], ('AWD-LSTM language model','exact'),
       ('AWD-LSTM classifier','checkpointing')]

@pytest.mark.parametrize('name,way', few)
def test_architecture(name, way):
    r = proved.row(name, way)
    assert r['what']=='proved' and (r['trained'] or 0)<=1e-8, r
