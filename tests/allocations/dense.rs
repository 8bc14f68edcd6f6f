//! Steps with dense variables.

use pushpull::blocking::Worker;
use pushpull::variable::{DType, Partitioner, Shape, bf16, f16};
use pushpull::{Gradients, Params, Token, VariableSpec};

use crate::cluster::{AllocationCase, GradientElement, check_counted, training, write};
use crate::counting::{WARM_UP, counted};

/// Small variables, so that there are many.
const TINY: [&str; 16] =
    ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"];

/// Returns the bulk allocations of worker and servers in a step: with separate operations, with
/// `push_and_pull`, and with a streaming push.
pub(crate) fn per_step(case: &AllocationCase) -> [[f64; 2]; 3] {
    // A variable in one piece, a partitioned one with padding, and more than one part for each
    // shard.
    let split = Partitioner::Fixed { shards: u32::from(case.shards) };
    let of = |name, elements| {
        VariableSpec::new(name, case.form.dtype, Shape::new([elements]).unwrap()).unwrap()
    };
    let mut variables = vec![
        of("small", 3),
        of("split", case.elements).partitioner(split.clone()),
        of("other", case.elements).partitioner(split),
    ];
    variables.extend(TINY.iter().map(|name| of(name, 3)));
    training(case, &variables, |worker, params| {
        let mut steps = DenseSteps { worker, params, step: 0 };
        match case.form.dtype {
            DType::F16 => steps.counted::<f16>(case),
            DType::Bf16 => steps.counted::<bf16>(case),
            DType::F64 => steps.counted::<f64>(case),
            _ => steps.counted::<f32>(case),
        }
    })
}

struct DenseSteps<'a> {
    worker: &'a mut Worker,
    params: &'a mut Params,
    step: usize,
}

impl DenseSteps<'_> {
    fn counted<T: GradientElement>(&mut self, case: &AllocationCase) -> [[f64; 2]; 3] {
        (0..WARM_UP).for_each(|_| self.verb_by_verb::<T>());
        let verb_by_verb = counted(case.steps, || self.verb_by_verb::<T>());
        let mut gradient = vec![T::of(0.0); case.elements as usize];
        (0..WARM_UP).for_each(|_| self.streamed::<T>(&mut gradient));
        let streamed = counted(case.steps, || self.streamed::<T>(&mut gradient));
        let token = self.worker.token().unwrap().unwrap();
        self.worker.pull(&token, self.params).unwrap();
        let mut token = Some(token);
        (0..WARM_UP).for_each(|_| token = self.at_once::<T>(token.take()));
        let at_once = counted(case.steps, || token = self.at_once::<T>(token.take()));
        [verb_by_verb, at_once, streamed]
    }

    fn verb_by_verb<T: GradientElement>(&mut self) {
        let token = self.worker.token().unwrap().unwrap();
        self.worker.pull(&token, self.params).unwrap();
        let gradients = self.gradients::<T>();
        check_counted(&self.worker.push(token, gradients).unwrap());
    }

    fn at_once<T: GradientElement>(&mut self, token: Option<Token>) -> Option<Token> {
        let gradients = self.gradients::<T>();
        self.worker.push_and_pull(token.unwrap(), gradients, self.params).unwrap().next.unwrap()
    }

    fn streamed<T: GradientElement>(&mut self, gradient: &mut [T]) {
        self.step += 1;
        write(gradient, self.step);
        let token = self.worker.token().unwrap().unwrap();
        self.worker.pull(&token, self.params).unwrap();
        let mut push = self.worker.begin(token).unwrap();
        push.variable("small", &gradient[..3]).unwrap();
        push.variable("other", gradient).unwrap();
        push.variable("split", gradient).unwrap();
        TINY.iter().for_each(|name| push.variable(name, &gradient[..3]).unwrap());
        check_counted(&push.finish().unwrap());
    }

    fn gradients<T: GradientElement>(&mut self) -> Gradients {
        self.step += 1;
        let mut gradients = self.worker.gradients();
        for name in ["small", "split", "other"] {
            write(gradients.view_mut::<T>(name).unwrap(), self.step);
        }
        gradients
    }
}
