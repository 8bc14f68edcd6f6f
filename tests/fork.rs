//! A child of `fork` has no session, client or server: what it inherits is refused by name, and its
//! parent goes on. Data loaders fork like this.
//!
//! This is one of the few files that may hold `unsafe` code.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::time::Duration;

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use pushpull::blocking::{FunctionClient, FunctionServer, Ps, Reader, Worker};
use pushpull::error::ServeError;
use pushpull::services::{Call, FunctionServerConfig, Functions, ServiceError};
use pushpull::{
    ClusterSpec, Error, Params, PsConfig, Sgd, TaskId, Token, VariableSpec, WorkerConfig,
};

/// Forks. Returns the child, or `None` in the child.
fn forked() -> Option<Pid> {
    // SAFETY: the child ends by `end`, and until then calls only what it tests. The C library makes
    // its allocator usable in a child of a process with several threads.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => None,
        ForkResult::Parent { child } => Some(child),
    }
}

/// Ends a child, without the destructors and the exit handlers of its parent.
fn end(result: Result<(), String>) -> ! {
    let failed = result.inspect_err(|why| eprintln!("in the child: {why}")).is_err();
    // SAFETY: ends the process at once.
    unsafe { nix::libc::_exit(i32::from(failed)) }
}

fn refused<T>(what: &str, result: Result<T, Error>) -> Result<(), String> {
    match result {
        Err(Error::Forked { parent, .. }) if parent == std::os::unix::process::parent_id() => {
            Ok(())
        }
        Err(other) => Err(format!("{what} is refused with {other}")),
        Ok(_) => Err(format!("{what} is not refused")),
    }
}

/// Returns whether an address is in memory that processes share.
fn is_shared<T>(at: *const T) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let map = maps.lines().find(|map| {
        let (range, _) = map.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let address = |hexadecimal| usize::from_str_radix(hexadecimal, 16).unwrap();
        (address(start)..address(end)).contains(&at.addr())
    });
    map.unwrap().split(' ').nth(1).unwrap().ends_with('s')
}

/// The objects that a child inherits from a process that trains, reads, calls and serves.
struct Inherited {
    worker: Worker,
    params: Params,
    token: Token,
    reader: Reader,
    client: FunctionClient,
    ps: Ps,
    functions: FunctionServer,
}

impl Inherited {
    fn assert_refused(mut self) -> Result<(), String> {
        refused("a token", self.worker.token())?;
        refused("a pull", self.worker.pull(&self.token, &mut self.params))?;
        let mut gradients = self.worker.gradients();
        let values = gradients.view_mut::<f32>("w").map_err(|error| error.to_string())?;
        if is_shared(values.as_ptr()) {
            return Err("a gradient is in the push buffer of the parent".to_owned());
        }
        values.fill(1e9);
        refused("a push", self.worker.push(self.token, gradients))?;
        refused("a pull of a reader", self.reader.pull(&mut self.params))?;
        match self.client.call(sum()) {
            Err(ServiceError::Forked { .. }) => {}
            other => return Err(format!("a call ends with {other:?}")),
        }
        let handle = self.ps.handle();
        handle.stop();
        handle.finish(Duration::ZERO);
        match self.ps.serve() {
            Err(ServeError::Forked { .. }) => {}
            other => return Err(format!("serving ends with {other:?}")),
        }
        self.functions.stop();
        // None of these waits for a thread of the parent, or takes its sockets.
        drop((self.worker, self.reader, self.client));
        Ok(())
    }
}

fn sum() -> Call {
    Call::new("add").feed("a", 1.0_f32).feed("b", 2.0_f32)
}

#[test]
fn a_child_is_refused_by_name_and_its_parent_trains_on() {
    let folder = tempfile::tempdir().unwrap();
    // Over a Unix socket the worker and the server share memory, which a child inherits.
    let socket = format!("unix:{}", folder.path().join("ps.sock").display());
    let cluster = ClusterSpec::builder().job("ps", [&socket]).workers(1).build().unwrap();
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0)).last_step(20);
    let ps = Ps::start(Ps::listen(&socket).unwrap(), config).unwrap();
    let elementwise = Functions::new().elementwise();
    let config = FunctionServerConfig::new(cluster.clone(), TaskId::worker(0), elementwise);
    let listener = FunctionServer::listen("127.0.0.1:0").unwrap();
    let functions = FunctionServer::start(listener, config).unwrap();
    let client = FunctionClient::connect(functions.target()).unwrap();
    let config = || WorkerConfig::new(cluster.clone(), TaskId::worker(0));
    let mut worker = Worker::connect(config()).unwrap();
    let mut params = worker.join(&[VariableSpec::f32("w", [1000]).unwrap()], |_| ()).unwrap();
    let mut reader = Reader::connect(config()).unwrap();
    let mut shared = 0;
    for step in 0..20_u8 {
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, &mut params).unwrap();
        if step % 5 == 0 {
            match forked() {
                Some(child) => {
                    assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
                }
                None => {
                    let inherited =
                        Inherited { worker, params, token, reader, client, ps, functions };
                    end(inherited.assert_refused());
                }
            }
        }
        let mut gradients = worker.gradients();
        let values = gradients.view_mut::<f32>("w").unwrap();
        values.fill(1.0);
        shared += u32::from(is_shared(values.as_ptr()));
        worker.push(token, gradients).unwrap();
        assert_eq!(client.call(sum()).unwrap().element::<f32>(), Ok(3.0));
    }
    assert!(worker.token().unwrap().is_none(), "the last step is reached");
    assert!(shared > 10, "{shared} gradients were in a push buffer");
    assert_eq!(reader.pull(&mut params).unwrap(), 20);
    assert_eq!(params.view::<f32>("w").unwrap(), [-20.0; 1000]);
    worker.leave().unwrap();
    functions.stop();
    ps.stop().unwrap();
}
