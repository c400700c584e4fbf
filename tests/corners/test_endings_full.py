"All endings × what comes next, of which tests/promise/test_endings.py takes some, and endings of short loaders"
import pytest
from contextlib import nullcontext
from harness import *
from test_endings import BS,follow,followers,learner,leave,named,search,some_followers,some_searches,table

@pytest.mark.parametrize('ending,follower',
                         named(o for o in itertools.product(table, followers) if o not in some_followers))
def test_all_that_follows(ending, follower, tmp_path): follow(ending, follower, tmp_path)

@pytest.mark.parametrize('n_epoch', [1,2])
@pytest.mark.parametrize('ending', table, ids=str)
def test_all_that_is_left(ending, n_epoch, tmp_path): leave(ending, n_epoch, tmp_path)

uncaught = [e for e in table if not e.is_caught]
@pytest.mark.parametrize('ending,follower',
                         named(o for o in itertools.product(uncaught, followers) if o not in some_searches))
def test_all_interrupted_searches(ending, follower, tmp_path): follow(ending, follower, tmp_path, fit=search)

@pytest.mark.parametrize('exc', [KeyboardInterrupt, OSError, CancelTrainException, CancelEpochException,
                                 CancelFitException])
@pytest.mark.parametrize('event', ['before_step','after_step'])
def test_end_of_a_short_loader(event, exc, tmp_path):
    "The loader is shorter than it said, so its last window is smaller; what is raised there leaves nothing either"
    def fail(cb):
        if cb.epoch==0 and cb.learn.accumulate_step.window.n_micro==3: raise exc('ended')
    a = learner(BS, tmp_path, [AccumulateStep(4), Callback(**{event:fail})])
    a.dls = make_dls(92, BS, skip=range(36), shuffle=False)   # 7 micro-batches instead of 12
    with nullcontext() if exc.__name__.startswith('Cancel') else pytest.raises(exc): a.fit(1)
    is_clean(a)
    n = a.accumulate_step.counts
    assert n.n_samples==n.n_stepped+n.n_thrown==56
