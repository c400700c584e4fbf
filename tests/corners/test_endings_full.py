"""All endings, each with four of the things that can come next, and endings of short loaders

What comes next sees only what an ending has left, so not every pair is needed: each ending meets a fit and three
others in turn, and each of the others meets about fifty endings. tests/promise/test_endings.py has all that can come
next after a normal end and after Ctrl-C."""
import pytest
from contextlib import nullcontext
from harness import *
from test_endings import BS,follow,followers,learner,leave,named,search,some_followers,some_searches,table

def in_turn(endings):
    names = [o for o in followers if o!='fit']
    for i,e in enumerate(endings): yield from ((e,f) for f in ('fit', *(names[(3*i+k)%len(names)] for k in range(3))))

@pytest.mark.parametrize('ending,follower', named(o for o in in_turn(table) if o not in some_followers))
def test_all_that_follows(ending, follower, tmp_path): follow(ending, follower, tmp_path)

@pytest.mark.parametrize('n_epoch', [1,2])
@pytest.mark.parametrize('ending', table, ids=str)
def test_all_that_is_left(ending, n_epoch, tmp_path): leave(ending, n_epoch, tmp_path)

uncaught = [e for e in table if not e.is_caught]
@pytest.mark.parametrize('ending,follower', named(o for o in in_turn(uncaught) if o not in some_searches))
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
