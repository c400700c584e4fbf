"A fit that makes no step says so once, and `weight=` with another signature gives an error of ours"
import pytest
from harness import *
from fastai_accum.all import *

class Skip(Callback):
    run_valid = False
    def __init__(self, event, error, every=4): self.error,self.every = error,every; setattr(self, event, self.stop)
    def stop(self):
        if (self.iter+1)%self.every: raise self.error

def warned(learn, n=1):
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        learn.fit(n)
    return [str(o.message) for o in ws if 'no step' in str(o.message)]

@pytest.mark.parametrize('event,error', [('before_step',CancelBatchException), ('before_step',CancelStepException),
    ('after_backward',CancelBatchException), ('before_batch',CancelBatchException), ('after_loss',CancelBatchException)])
@pytest.mark.parametrize('cb', [lambda: AccumulateStep(4), lambda: AccumulateStep(n_samples=32), lambda: MicroBatch(4)])
def test_all_windows_are_cancelled(cb, event, error):
    learn = make_learner(make_dls(24, 8), cbs=[cb(), Skip(event, error)])
    said, = warned(learn, 3)
    assert type(learn.cbs.filter(risinstance((AccumulateStep,MicroBatch)))[0]).__name__ in said and 'was cancelled' in said

def test_one_step_is_enough():
    assert not warned(make_learner(make_dls(64, 8), cbs=[AccumulateStep(2), Skip('before_step', CancelStepException)]))

def test_trials_say_nothing():
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(2))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.noise_scale(2, 3, False)
        learn.check_accumulation()

@pytest.mark.parametrize('weight', [lambda y: len(y), lambda: 1, lambda pred, y, z: 1, lambda pred, *, y: 1, len])
@pytest.mark.parametrize('cb', [partial(AccumulateStep, 4), partial(MicroBatch, 4)])
def test_weight_of_another_signature(cb, weight):
    with pytest.raises(TypeError) as e: make_learner(make_dls(64, 8), cbs=cb(weight=weight)).fit(1)
    assert f'{cb.func.__name__}: ' in ' '.join(e.value.__notes__) and 'weight(pred, *yb)' in ' '.join(e.value.__notes__)
