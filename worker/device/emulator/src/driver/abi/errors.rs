//! `cuGetErrorName` and `cuGetErrorString`.

use std::ffi::c_char;
use std::ptr::null;

use super::pointers::Out;
use crate::driver::code::{DriverErrorCode, DriverResult};

super::driver_functions! {
    plain cuGetErrorName(error: u32, text: Out<*const c_char>) || {
        let (name, _) = texts(error, text)?;
        text.set(name)
    };
    plain cuGetErrorString(error: u32, text: Out<*const c_char>) || {
        let (_, message) = texts(error, text)?;
        text.set(message)
    };
}

fn texts(error: u32, text: Out<*const c_char>) -> DriverResult<(*const c_char, *const c_char)> {
    match crate::driver::code::describe(error) {
        Some((name, message)) => Ok((name.as_ptr(), message.as_ptr())),
        None => {
            text.set_if_wanted(null());
            Err(DriverErrorCode::INVALID_VALUE)
        }
    }
}
