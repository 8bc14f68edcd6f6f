//! Runtime of a service: its connections, its functions and its timer.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, TaskId};
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::{BodyCrc, Hello, OutputRef};
use pushpull_common::protocol::{
    Envelope, Features, FrameEvent, FrameReader, FrameSink, Header, Refusal,
};
use pushpull_net::auth::{AccessReport, ProvenPeer};
use pushpull_net::{ConnectionPhase, ConnectionSide, FrameStream, Stream};
use tokio::sync::{Notify, oneshot, watch};

use super::descriptor_watch::DescriptorWatch;
use super::ended_execution::{CatchUnwind, EndedExecution, failure_without, result_of};
use super::function_pool::{FunctionPool, Job};
use super::outbox::CallOutbox;
use super::timer::Timer;
use crate::call_session::Admission;
use crate::cancel::CancelFlag;
use crate::execution_waits::ExecutionWaits;
use crate::function_table::FunctionTable;
use crate::functions::{Body, Functions};
use crate::inputs::{InputResolver, unsuitable};
use crate::invocation::{Invocation, ServerShared};
use crate::service::{
    ExecutionId, ExecutionOrder, Failure, InputSource, OutputUser, Service, ServiceInput,
    ServiceOutput, output_awaited,
};
use crate::value::Value;

/// A service with its connections and functions. Its tasks and the threads of functions share it.
#[derive(Debug)]
pub(crate) struct ServerCore {
    service: Mutex<Service>,
    functions: Functions,
    table: Arc<FunctionTable>,
    shared: Arc<ServerShared>,
    resolver: InputResolver,
    pool: FunctionPool,
    runtime: tokio::runtime::Handle,
    outboxes: Mutex<HashMap<u64, Arc<CallOutbox>>>,
    executions: Mutex<HashMap<ExecutionId, Arc<CancelFlag>>>,
    fetches: Mutex<HashMap<u64, oneshot::Sender<Result<Value, Refusal>>>>,
    next_connection: AtomicU64,
    next_fetch: AtomicU64,
    timer: Timer,
    /// The number of connections that are open.
    connections: watch::Sender<usize>,
    /// Notified when calls have ended.
    ended: Notify,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The machines keep their invariants between inputs, and a panic of a function is caught.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServerCore {
    pub(crate) fn new(
        service: Service,
        functions: Functions,
        table: Arc<FunctionTable>,
        shared: Arc<ServerShared>,
        resolver: InputResolver,
        runtime: tokio::runtime::Handle,
    ) -> ServerCore {
        let name = format!("function-{}-{}", shared.task.job, shared.task.index);
        let pool = FunctionPool::new(name, service.threads());
        ServerCore {
            service: Mutex::new(service),
            functions,
            table,
            shared,
            resolver,
            pool,
            runtime,
            outboxes: Mutex::default(),
            executions: Mutex::default(),
            fetches: Mutex::default(),
            next_connection: AtomicU64::new(1),
            next_fetch: AtomicU64::new(1),
            timer: Timer::default(),
            connections: watch::Sender::new(0),
            ended: Notify::new(),
        }
    }

    /// Returns the task of the server.
    pub(crate) fn task(&self) -> &TaskId {
        &self.shared.task
    }

    /// Returns the threads of blocking functions.
    #[cfg(test)]
    pub(crate) fn pool(&self) -> &FunctionPool {
        &self.pool
    }

    /// Returns who may be connected.
    pub(crate) fn access(&self) -> &AccessReport {
        &self.shared.access
    }

    /// Returns the watch that reports a lack of file descriptors.
    pub(crate) fn descriptors(&self) -> &DescriptorWatch {
        &self.shared.descriptors
    }

    /// Fails the calls that functions make, now and later.
    pub(crate) fn end_nested_calls(&self) {
        self.shared.clients.end();
    }

    /// Runs a task on the server's thread.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    /// Ticks the service at the times that it asks for.
    pub(crate) async fn run_timer(self: &Arc<Self>) {
        let tick = || {
            self.handle(ServiceInput::Tick);
            lock(&self.service).wake_at()
        };
        self.timer.run(tick).await;
    }

    /// Serves a client that has said hello until either side closes the connection.
    pub(crate) async fn serve(
        self: Arc<Self>,
        stream: Stream,
        mut reader: FrameReader,
        header: Header,
        hello: Hello,
        body_crc: BodyCrc,
        proven: Option<ProvenPeer>,
    ) {
        let connection = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let outbox = Arc::new(CallOutbox::default());
        reader.set_features(Features::ALL);
        outbox.agree(reader.features());
        lock(&self.outboxes).insert(connection, outbox.clone());
        let registration = Registration { core: self.clone(), connection };
        self.connections.send_modify(|open| *open += 1);
        let request = header.request;
        let client = hello.incarnation;
        let principal = proven.as_ref().map(|proven| proven.principal.clone());
        self.handle(ServiceInput::Connected { connection, request, client, body_crc, principal });
        let mut frames = FrameStream::new(stream, reader);
        frames.open();
        let mut side = CallServerSide { core: &self, connection, outbox: &outbox };
        let lease = lock(&self.service).lease();
        // However the connection ends, the client sees it closed and connects again. One that does
        // not read its answers for a lease keeps neither them nor the connection.
        tokio::select! {
            served = frames.serve(&mut side, drop) => {
                if let Err(ReadError::Io(error)) = served {
                    self.descriptors().check(&error);
                }
            }
            () = outbox.stalled(lease) => {}
            () = self.access().revoked(proven.as_ref()) => {}
        }
        drop((frames, registration));
    }

    /// Accepts no more calls, waits until those that were accepted have ended, for at most `grace`,
    /// and closes all connections. Returns how many functions still run.
    pub(crate) async fn drain(self: &Arc<Self>, grace: Duration) -> usize {
        self.handle(ServiceInput::Drain);
        let drained = async {
            loop {
                let ended = self.ended.notified();
                if lock(&self.service).is_drained() {
                    return;
                }
                ended.await;
            }
        };
        let _ = tokio::time::timeout(grace, drained).await;
        for flag in lock(&self.executions).values() {
            flag.raise();
        }
        for outbox in lock(&self.outboxes).values() {
            outbox.say_goodbye();
            outbox.close();
        }
        // A client that does not read its answers does not keep the server.
        let mut open = self.connections.subscribe();
        let closed = open.wait_for(|&open| open == 0);
        let _ = tokio::time::timeout(CLOSING_TIMEOUT, closed).await;
        for outbox in lock(&self.outboxes).values() {
            outbox.give_up();
        }
        self.pool.end(CLOSING_TIMEOUT)
    }

    /// Passes an input to the service and carries out its outputs.
    pub(crate) fn handle(self: &Arc<Self>, input: ServiceInput<'_>) {
        let mut service = lock(&self.service);
        service.handle(Instant::now(), input);
        let mut orders = Vec::new();
        while let Some(output) = service.poll_output() {
            match output {
                ServiceOutput::Execute(order) => orders.push(order),
                other => self.deliver(other),
            }
        }
        self.timer.set(service.wake_at());
        drop(service);
        for order in orders {
            self.execute(*order);
        }
        // Any of these events may end the last call.
        self.ended.notify_waiters();
    }

    fn deliver(&self, output: ServiceOutput) {
        match output {
            ServiceOutput::Send { connection, request, message, body, crc } => {
                if let Some(outbox) = lock(&self.outboxes).get(&connection) {
                    let envelope = Envelope { request, ..Envelope::default() };
                    outbox.push(&envelope, &message, body, crc);
                }
            }
            ServiceOutput::LocalFetched { fetch, result } => {
                if let Some(waiting) = lock(&self.fetches).remove(&fetch) {
                    // The function may have been cancelled.
                    let _ = waiting.send(result);
                }
            }
            ServiceOutput::Cancel { execution } => {
                if let Some(flag) = lock(&self.executions).get(&execution) {
                    flag.raise();
                }
            }
            ServiceOutput::Close { connection } => {
                if let Some(outbox) = lock(&self.outboxes).get(&connection) {
                    outbox.close();
                }
            }
            ServiceOutput::Execute(_) => {}
        }
    }

    /// Begins an execution: fetches its inputs, then runs the function.
    fn execute(self: &Arc<Self>, order: ExecutionOrder) {
        let flag = Arc::new(CancelFlag::default());
        lock(&self.executions).insert(order.execution, flag.clone());
        let waits = self.waits_of(order.execution);
        let has_values =
            |(_, source): &(String, InputSource)| matches!(source, InputSource::Value(_));
        if order.inputs.iter().all(has_values) {
            return self.start(order, flag, waits);
        }
        let core = self.clone();
        self.runtime.spawn(async move {
            let mut order = order;
            let resolved = tokio::select! {
                resolved = core.resolve(&mut order, &waits) => resolved,
                () = flag.raised() => Err(Failure::Cancelled),
            };
            match resolved {
                Ok(()) => core.start(order, flag, waits),
                Err(failure) => core.returned(order.execution, Err(failure)),
            }
        });
    }

    /// Returns the waits of an execution, of which the service is told.
    fn waits_of(self: &Arc<Self>, execution: ExecutionId) -> Arc<ExecutionWaits> {
        let core = Arc::downgrade(self);
        Arc::new(ExecutionWaits::new(move |awaited| {
            if let Some(core) = core.upgrade() {
                core.handle(ServiceInput::Waits { execution, awaited });
            }
        }))
    }

    async fn resolve(
        self: &Arc<Self>,
        order: &mut ExecutionOrder,
        waits: &ExecutionWaits,
    ) -> Result<(), Failure> {
        let execution = order.execution;
        for (name, source) in &mut order.inputs {
            let admission = self.admission(execution);
            let admission = match &order.principal {
                Some(principal) => admission.of_principal(&principal.name),
                None => admission,
            };
            let value = match source {
                InputSource::Value(_) => continue,
                InputSource::Variable(variable) => {
                    let function = &order.function;
                    let pulled =
                        self.resolver.variable(function, name, variable, &admission, waits);
                    pulled.await?
                }
                InputSource::Output { task, of } if *task == self.shared.task => {
                    let client = order.client;
                    let user = OutputUser::of(client, order.principal.as_deref(), of.owner);
                    let deadline = order.deadline;
                    let fetched = self.fetch_here(execution, client, user, of.clone(), deadline);
                    waits.during(|| output_awaited(of, &self.shared.task), fetched).await?
                }
                InputSource::Output { task, of } => {
                    let of_task = of.clone();
                    let deadline = order.deadline;
                    let fetched = self.resolver.fetch(task, of_task, deadline, admission);
                    waits.during(|| output_awaited(of, task), fetched).await?
                }
            };
            *source = InputSource::Value(value);
        }
        let facts = self.table.get(&order.function);
        let Some(signature) = facts.and_then(|facts| facts.signature.as_ref()) else {
            return Ok(());
        };
        let types = order.inputs.iter().map(|(name, source)| {
            let value = match source {
                InputSource::Value(value) => Some(value.value_type()),
                _ => None,
            };
            (&name[..], value)
        });
        signature.check_inputs(types).map_err(|mismatch| {
            let input = &mismatch.name[..];
            let detail = mismatch.detail;
            unsuitable(&order.function, input, detail)
        })
    }

    /// Returns the admission of one input of an execution, which charges it to the client of the
    /// call.
    fn admission(self: &Arc<Self>, execution: ExecutionId) -> Admission {
        let core = self.clone();
        let charged = OnceLock::new();
        Admission::new(move |bytes| match charged.get() {
            // A broken connection has it fetched again.
            Some(&charged) if bytes <= charged => Ok(()),
            _ => {
                lock(&core.service).charge_input(execution, bytes)?;
                let _ = charged.set(bytes);
                Ok(())
            }
        })
    }

    /// Fetches an output that a call has left on this server.
    async fn fetch_here(
        self: &Arc<Self>,
        execution: ExecutionId,
        client: Incarnation,
        user: OutputUser,
        of: OutputRef,
        deadline: Option<Instant>,
    ) -> Result<Value, Failure> {
        let (sender, receiver) = oneshot::channel();
        let fetch = self.next_fetch.fetch_add(1, Ordering::Relaxed);
        lock(&self.fetches).insert(fetch, sender);
        let _open = OpenFetch { core: self, fetch };
        self.handle(ServiceInput::LocalFetch { fetch, execution, client, user, of, deadline });
        match receiver.await {
            Ok(result) => result.map_err(Failure::Refused),
            Err(_) => Err(Failure::Cancelled),
        }
    }

    /// Runs a function whose inputs are there.
    fn start(
        self: &Arc<Self>,
        order: ExecutionOrder,
        flag: Arc<CancelFlag>,
        waits: Arc<ExecutionWaits>,
    ) {
        let execution = order.execution;
        let value = |(name, source): (String, InputSource)| match source {
            InputSource::Value(value) => Some((name, value)),
            _ => None,
        };
        let call = Invocation {
            depth: order.depth,
            scheduled: order.scheduled,
            step: None,
            values: OnceLock::new(),
            has_pushed: false,
            deadline: order.deadline,
            device: order.device,
            inputs: order.inputs.into_iter().filter_map(value).collect(),
            cancelled: flag,
            waits,
            shared: self.shared.clone(),
            function: order.function,
        };
        match self.functions.body(&call.function) {
            Some(Body::Blocking(body)) => {
                let core = self.clone();
                let body = body.clone();
                let cancelled = call.cancelled.clone();
                let ended = EndedExecution { core, execution, result: None };
                let job: Job = Box::new(move |thread| {
                    let mut call = call;
                    let mut ended = ended;
                    ended.result = Some(match thread {
                        Ok(()) => {
                            let returned = catch_unwind(AssertUnwindSafe(|| body(&mut call)));
                            result_of(returned, &cancelled)
                        }
                        Err(reason) => Err(failure_without(reason)),
                    });
                    drop(call);
                });
                if let Err((job, reason)) = self.pool.run(job) {
                    // The end of an execution begins the next call, of which thousands may wait:
                    // they must not begin inside each other.
                    self.runtime.spawn(async move { job(Err(reason)) });
                }
            }
            Some(Body::Asynchronous(body)) => {
                let core = self.clone();
                let body = body.clone();
                let cancelled = call.cancelled.clone();
                self.runtime.spawn(async move {
                    let mut ended = EndedExecution { core, execution, result: None };
                    let begun = catch_unwind(AssertUnwindSafe(|| body(call)));
                    let result = match begun {
                        Ok(future) => CatchUnwind(future).await,
                        Err(panic) => Err(panic),
                    };
                    ended.result = Some(result_of(result, &cancelled));
                });
            }
            // The service knows the functions of the same table.
            None => self.returned(execution, Err(Failure::Cancelled)),
        }
    }

    pub(super) fn returned(
        self: &Arc<Self>,
        execution: ExecutionId,
        result: Result<Vec<(String, Value)>, Failure>,
    ) {
        lock(&self.executions).remove(&execution);
        self.handle(ServiceInput::Returned { execution, result });
    }
}

/// The longest time that a stopping server waits for clients that do not read, and for functions.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(1);

/// A fetch that an execution waits for. Dropping it removes the waiter: the execution is cancelled.
struct OpenFetch<'a> {
    core: &'a ServerCore,
    fetch: u64,
}

impl Drop for OpenFetch<'_> {
    fn drop(&mut self) {
        lock(&self.core.fetches).remove(&self.fetch);
    }
}

/// The registration of a connection. Dropping it reports the end of the connection.
struct Registration {
    core: Arc<ServerCore>,
    connection: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        lock(&self.core.outboxes).remove(&self.connection);
        self.core.connections.send_modify(|open| *open -= 1);
        self.core.handle(ServiceInput::Disconnected { connection: self.connection });
    }
}

/// The server's side of a connection.
struct CallServerSide<'a> {
    core: &'a Arc<ServerCore>,
    connection: u64,
    outbox: &'a CallOutbox,
}

impl FrameSink for CallServerSide<'_> {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        let connection = self.connection;
        self.core.handle(match event {
            FrameEvent::Message(header, message) => {
                ServiceInput::Message { connection, header, message }
            }
            FrameEvent::Body => ServiceInput::Body { connection },
            FrameEvent::Progress => ServiceInput::Progress { connection },
        });
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        lock(&self.core.service).with_body(self.connection, receive)
    }
}

impl ConnectionSide for CallServerSide<'_> {
    fn flush(&mut self, stream: &Stream) -> io::Result<bool> {
        let flushed = self.outbox.flush(stream)?;
        if flushed.drains {
            // A client that reads a long answer is alive, although its heartbeats are not read.
            let connection = self.connection;
            self.core.handle(ServiceInput::Progress { connection });
        }
        Ok(flushed.is_left)
    }

    fn phase(&self) -> ConnectionPhase {
        self.outbox.phase()
    }

    fn changed(&self) -> &Notify {
        self.outbox.changed()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use pushpull_common::cluster::ClusterSpec;
    use pushpull_common::identity::Identity;
    use pushpull_common::ids::{ClientEpoch, GlobalStep, RequestId, RestoreEpoch, ShardId};
    use pushpull_common::protocol::message::{Call, CallInputs, FeatureOffer, Role};
    use pushpull_common::protocol::wire::{List, Text};
    use pushpull_common::protocol::{BodyStamp, Message, encode, version};

    use super::*;
    use crate::{FunctionServer, FunctionServerConfig};

    /// Limit on every wait.
    const LONG: Duration = Duration::from_secs(60);

    fn frame(request: u64, message: impl Into<Message>) -> Vec<u8> {
        let envelope = Envelope { request: RequestId(request), ..Envelope::default() };
        let mut frame = Vec::new();
        encode(&mut frame, &envelope, &message.into(), BodyStamp::NONE);
        frame
    }

    fn hello() -> Hello {
        Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: Role::Client {},
            job: Text::clipped("client"),
            task: 0,
            shard: ShardId::default(),
            incarnation: Incarnation(5),
            client_epoch: ClientEpoch(0),
            seen_epoch: RestoreEpoch(0),
            seen_arena: 0,
            seen_step: GlobalStep(0),
            catalogue: None,
            body_crc: BodyCrc::Off {},
            identity: Identity::new().with_protocol().to_wire(),
            auth: None,
            features: FeatureOffer::of(Features::ALL),
        }
    }

    #[test]
    fn a_client_that_reads_no_answers_loses_its_connection_after_a_lease() {
        let value = Value::zeros::<f32>(&[1 << 18]).unwrap();
        let functions = Functions::new().add_async("large", move |_| {
            let value = value.clone();
            async move { Ok(value) }
        });
        let listener = FunctionServer::listen("127.0.0.1:0").unwrap();
        let cluster = ClusterSpec::builder().job("local", [listener.address()]).build().unwrap();
        let config = FunctionServerConfig::new(cluster, TaskId::new("local", 0), functions);
        let lease = Duration::from_millis(300);
        let server = listener.start(config.lease(lease).cuda(false)).unwrap();
        let mut stream = TcpStream::connect(server.target()).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
        stream.write_all(&frame(1, hello())).unwrap();
        let begun = Instant::now();
        // It calls, and acknowledges what it does not read, until the server has closed the
        // connection.
        let refused = (1..).find(|&number: &u64| {
            let call = Call {
                call: number,
                settled: number.saturating_sub(16),
                ended: List::default(),
                depth: 0,
                function: Text::clipped("large"),
                device: Text::clipped(""),
                any_device: false,
                retain: false,
                scheduled: None,
                inputs: CallInputs::default(),
            };
            stream.write_all(&frame(1 + number, call)).is_err()
        });
        assert!(refused.is_some() && begun.elapsed() < LONG, "{:?}", begun.elapsed());
    }
}
