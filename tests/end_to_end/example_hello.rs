//! The example `hello`: a text that a server makes and a client prints.

#![allow(dead_code, reason = "the example has a main of its own")]

#[path = "../../examples/hello.rs"]
mod hello;

#[test]
fn the_text_comes_back_from_the_server() {
    assert_eq!(hello::hello().unwrap(), "Hello, distributed pushpull!");
}
