//! `cuGetErrorName`, `cuGetErrorString`, `cuGetProcAddress` and the profiler.

use std::ffi::{c_char, c_void};
use std::ptr::null;

use super::pointers::{Out, Text};
use super::{
    contexts, copies, devices, events, launches, memory, modules, occupancy, pools, streams,
};
use crate::driver::code::{Code, Status};

super::driver_functions! {
    plain cuGetErrorName(error: u32, text: Out<*const c_char>) || {
        let (name, _) = texts(error, text)?;
        text.set(name)
    };
    plain cuGetErrorString(error: u32, text: Out<*const c_char>) || {
        let (_, message) = texts(error, text)?;
        text.set(message)
    };
    plain cuGetProcAddress(
        name: Text,
        address: Out<*const c_void>,
        _version: i32,
        _flags: u64,
    ) || find(name, address).map(|_| ());
    plain cuGetProcAddress_v2(
        name: Text,
        address: Out<*const c_void>,
        _version: i32,
        _flags: u64,
        status: Out<i32>,
    ) || {
        let found = find(name, address);
        status.set_if_wanted(i32::from(found.is_err()));
        found
    };
    plain cuProfilerStart() || Ok(());
    plain cuProfilerStop() || Ok(());
}

fn texts(error: u32, text: Out<*const c_char>) -> Status<(*const c_char, *const c_char)> {
    match crate::driver::code::describe(error) {
        Some((name, message)) => Ok((name.as_ptr(), message.as_ptr())),
        None => {
            text.set_if_wanted(null());
            Err(Code::INVALID_VALUE)
        }
    }
}

/// Finds a function by its name without its version: the newest version is meant.
fn find(name: Text, address: Out<*const c_void>) -> Status {
    let name = name.name()?;
    let tables = [
        address_of,
        contexts::address_of,
        copies::address_of,
        devices::address_of,
        events::address_of,
        launches::address_of,
        memory::address_of,
        modules::address_of,
        occupancy::address_of,
        pools::address_of,
        streams::address_of,
    ];
    let names = [format!("{name}_v2"), name.to_owned()];
    let found = names.iter().find_map(|name| tables.iter().find_map(|table| table(name)));
    match found {
        Some(found) => address.set(found),
        None => {
            address.set_if_wanted(null());
            Err(Code::NOT_FOUND)
        }
    }
}
