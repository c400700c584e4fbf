"Every callback that fastai ships beside `AccumulateStep`"
from matrix import *

@row('Callbacks', 'GradientClip', note='each `norm_type`; clips the finished gradient of a window')
@pytest.mark.parametrize('norm_type', [1., 2., math.inf])
def test_gradient_clip(norm_type, works):
    a,b = pair(partial(GradientClip, .01, norm_type))
    works(a, b)
