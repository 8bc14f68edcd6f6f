//! The first program of the classic documents: a server of one task in this process, and a client
//! of it.
//!
//! ```sh
//! cargo run --example hello
//! ```
//!
//! The text is made by the server and comes back over a connection.

use std::error::Error;

use pushpull::blocking::{FunctionClient, FunctionServer};
use pushpull::services::{Call, Functions};

/// Calls a function of a local server, and returns its answer.
pub(crate) fn hello() -> Result<String, Box<dyn Error>> {
    let functions = Functions::new()
        .add("hello", |call| Ok(format!("Hello, {}!", call.input("whom")?.text()?)));
    let server = FunctionServer::local(functions)?;
    let client = FunctionClient::connect(server.target())?;
    let outputs = client.call(Call::new("hello").feed("whom", "distributed pushpull"))?;
    Ok(outputs.text()?.to_owned())
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("{}", hello()?);
    Ok(())
}
