//! Steps of variables that are not sparse.

use pushpull::blocking::Worker;
use pushpull::{DType, Gradients, Params, Partitioner, Shape, Token, VariableSpec, bf16, f16};

use crate::cluster::{Case, Number, counts, training, write};
use crate::counting::{WARM_UP, counted};

/// Beside the others, so that there are many.
const TINY: [&str; 16] =
    ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"];

/// What worker and servers allocate in a step: verb by verb, as one operation, and with a push that is
/// handed over variable by variable.
pub(crate) fn per_step(case: &Case) -> [[f64; 2]; 3] {
    // One that is whole, one that is split with padding between, and more than one part of each shard.
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
        let mut steps = Steps { worker, params, step: 0 };
        match case.form.dtype {
            DType::F16 => steps.counted::<f16>(case),
            DType::Bf16 => steps.counted::<bf16>(case),
            DType::F64 => steps.counted::<f64>(case),
            _ => steps.counted::<f32>(case),
        }
    })
}

struct Steps<'a> {
    worker: &'a mut Worker,
    params: &'a mut Params,
    step: usize,
}

impl Steps<'_> {
    fn counted<T: Number>(&mut self, case: &Case) -> [[f64; 2]; 3] {
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

    fn verb_by_verb<T: Number>(&mut self) {
        let token = self.worker.token().unwrap().unwrap();
        self.worker.pull(&token, self.params).unwrap();
        let gradients = self.gradients::<T>();
        counts(&self.worker.push(token, gradients).unwrap());
    }

    fn at_once<T: Number>(&mut self, token: Option<Token>) -> Option<Token> {
        let gradients = self.gradients::<T>();
        self.worker.push_and_pull(token.unwrap(), gradients, self.params).unwrap().next.unwrap()
    }

    fn streamed<T: Number>(&mut self, gradient: &mut [T]) {
        self.step += 1;
        write(gradient, self.step);
        let token = self.worker.token().unwrap().unwrap();
        self.worker.pull(&token, self.params).unwrap();
        let mut push = self.worker.begin(token).unwrap();
        push.variable("small", &gradient[..3]).unwrap();
        push.variable("other", gradient).unwrap();
        push.variable("split", gradient).unwrap();
        TINY.iter().for_each(|name| push.variable(name, &gradient[..3]).unwrap());
        counts(&push.finish().unwrap());
    }

    fn gradients<T: Number>(&mut self) -> Gradients {
        self.step += 1;
        let mut gradients = self.worker.gradients();
        for name in ["small", "split", "other"] {
            write(gradients.view_mut::<T>(name).unwrap(), self.step);
        }
        gradients
    }
}
