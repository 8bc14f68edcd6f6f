//! The example `hello`: a text that a server makes and a client prints.

#![allow(dead_code, reason = "the example has a main of its own")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../examples/hello.rs"]
mod hello;

#[test]
fn the_text_comes_back_from_the_server() {
    assert_eq!(hello::hello().unwrap(), "Hello, distributed pushpull!");
}
