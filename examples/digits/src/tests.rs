//! Trains the network on the digits without servers.

use pushpull::variable::{Initializer, Shape};

use super::data::{Batch, Batches, Split};
use super::model::{Mlp, NAMES};

#[test]
fn gradient_descent_learns_the_digits() {
    let Split { train, test } = Split::digits();
    let mut model = Mlp::new(train.width, 64, train.classes);
    let mut params = model.shapes().map(|shape| vec![0.0_f32; shape.iter().product()]);
    for tensor in [0, 2] {
        let extents: Vec<u64> =
            model.shapes()[tensor].iter().map(|&extent| extent as u64).collect();
        let (shape, values) = (Shape::new(extents).unwrap(), &mut params[tensor]);
        Initializer::GlorotUniform.fill(1, NAMES[tensor], &shape, 0, values);
    }
    let mut gradients = params.clone();
    let mut batches = Batches::new(train.rows(), 0, 1, 32, 1).unwrap();
    let (mut batch, mut loss) = (Batch::default(), f32::NAN);
    for _ in 0..600 {
        batches.next_into(&train, &mut batch);
        let views = gradients.each_mut().map(Vec::as_mut_slice);
        loss = model.gradients(params.each_ref().map(Vec::as_slice), batch.samples(), views);
        for (param, gradient) in params.iter_mut().flatten().zip(gradients.iter().flatten()) {
            *param -= 0.3 * gradient;
        }
    }
    let accuracy = model.accuracy(params.each_ref().map(Vec::as_slice), test.samples());
    assert!(accuracy >= 0.95, "accuracy {accuracy}, last loss {loss}");
}
