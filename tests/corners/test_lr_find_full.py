"The curves of `lr_find` that tests/promise/test_lr_find.py leaves out"
import pytest
from harness import *
from fastai_accum.patch import *
from test_lr_find import cases,curve,in_the_middle,some

@pytest.mark.parametrize('how', ['callback','patch'])
@pytest.mark.parametrize('nm', cases)
@pytest.mark.filterwarnings('ignore:AccumulateStep.*a window of 8 micro-batches is more')
def test_all_curves(nm, how, tmp_path):
    if (nm,how) not in some: curve(nm, how, tmp_path)

def test_in_the_middle_by_patch(tmp_path): in_the_middle('patch', tmp_path)

def test_shuffled(tmp_path):
    "Twice the same curve also from a loader that shuffles, given the same seed"
    learn = make_learner(make_dls(76, 8), path=tmp_path)
    def curve():
        learn.dls.train.rng = random.Random(1)
        learn.lr_find(num_it=30, show_plot=False)
        return learn.recorder.losses
    with accumulation(4): assert curve()==curve()
