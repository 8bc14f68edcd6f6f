//! A convolutional network on handwritten digits, trained by candle over parameter servers.
//!
//! Start the servers with the rule and the number of steps, then each worker with its index:
//!
//! ```sh
//! pushpull-ps --ps-hosts 127.0.0.1:2222 --optimizer adam --learning-rate 0.003 --last-step 600 &
//! cargo run --release --example distributed "ps=127.0.0.1:2222;worker=a:1,b:1" 0 &
//! cargo run --release --example distributed "ps=127.0.0.1:2222;worker=a:1,b:1" 1
//! ```

mod digits;

use candle_core::{DType, Device};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use digits::{Digits, Network};
use pushpull_candle::PushPull;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let digits = Digits::load(&Device::Cpu)?;
    let variables = VarMap::new();
    let network = Network::new(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let mut optimizer = PushPull::from_varmap(&variables, digits::training()?)?;
    while optimizer.ready()? {
        let (images, labels) = digits.batch(digits::share(optimizer.global_step())?, 64)?;
        let loss = network.loss(&images, &labels)?;
        optimizer.backward_step(&loss)?;
    }
    println!("accuracy {:.4}", network.accuracy(&digits)?);
    Ok(())
}
