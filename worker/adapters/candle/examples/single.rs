//! A convolutional network on handwritten digits, trained by candle in one process.
//!
//! `cargo run --release --example single`

mod digits;

use candle_core::{DType, Device};
use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
use digits::{Digits, Network};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let digits = Digits::load(&Device::Cpu)?;
    let variables = VarMap::new();
    let network = Network::new(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let mut optimizer = AdamW::new_lr(variables.all_vars(), 0.003)?;
    for step in 0..600 {
        let (images, labels) = digits.batch(step, 64)?;
        let loss = network.loss(&images, &labels)?;
        optimizer.backward_step(&loss)?;
    }
    println!("accuracy {:.4}", network.accuracy(&digits)?);
    Ok(())
}
