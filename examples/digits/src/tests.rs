//! Trains the network on the digits without servers.

use pushpull::variable::{Initializer, Shape};

use super::data::{CLASSES, Dataset, Split};
use super::model::{Mlp, NAMES};

#[test]
fn gradient_descent_learns_the_digits() {
    let split = Split::digits().unwrap();
    let mut model = Mlp::new(split.width(), 64, CLASSES);
    let mut params = model.shapes().map(|shape| vec![0.0_f32; shape.iter().product()]);
    for tensor in [0, 2] {
        let extents: Vec<u64> =
            model.shapes()[tensor].iter().map(|&extent| extent as u64).collect();
        let (shape, values) = (Shape::new(extents).unwrap(), &mut params[tensor]);
        Initializer::GlorotUniform.fill(1, NAMES[tensor], &shape, 0, values);
    }
    let mut gradients = params.clone();
    let pipeline = split.train.shuffle(1).batch(32).repeat();
    let mut loss = f32::NAN;
    for batch in pipeline.shard(0, 1).unwrap().take(600) {
        let batch = Dataset::of(&batch.unwrap().samples);
        let views = gradients.each_mut().map(Vec::as_mut_slice);
        loss = model.gradients(params.each_ref().map(Vec::as_slice), batch.samples(), views);
        for (param, gradient) in params.iter_mut().flatten().zip(gradients.iter().flatten()) {
            *param -= 0.3 * gradient;
        }
    }
    let accuracy = model.accuracy(params.each_ref().map(Vec::as_slice), split.test.samples());
    assert!(accuracy >= 0.95, "accuracy {accuracy}, last loss {loss}");
}
