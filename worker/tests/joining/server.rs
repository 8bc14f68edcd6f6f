//! A scripted server. It accepts declarations, first values, restores and saves, logs its requests,
//! and crashes when scripted.

use std::collections::BTreeMap;
use std::io::{self, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::codec::Encodings;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{
    self, BodyCrc, CatalogueState, CheckpointId, ModeIs, NonFinitePolicy, Welcome,
};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{
    BodyPoll, BodyStamp, Envelope, FrameReader, Header, Message, Outcome, Poll, PushState, Refusal,
    encode, version,
};

/// The state of a server.
#[derive(Default)]
pub(crate) struct ServerState {
    pub(crate) catalogue: Option<Catalogue>,
    pub(crate) ready: bool,
    pub(crate) epoch: RestoreEpoch,
    pub(crate) step: GlobalStep,
    pub(crate) checkpoint: Option<CheckpointId>,
    pub(crate) refuses_checkpoint: bool,
    /// The log of the requests that matter to these tests.
    pub(crate) requests: Vec<String>,
    /// The user data of the last save.
    pub(crate) user: Vec<u8>,
    /// The requests on whose first arrival the server crashes, and how.
    pub(crate) crashes_at: BTreeMap<&'static str, CrashKind>,
}

/// The effect of a crash.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CrashKind {
    /// All state is lost, and the request is not executed.
    LosesState,
    /// All state is kept and the request is executed; only its answer is lost.
    LosesAnswer,
}

/// A server of one shard that listens until it is dropped.
pub(crate) struct ScriptedServer {
    pub(crate) address: String,
    state: Arc<Mutex<ServerState>>,
    acceptor: Option<JoinHandle<()>>,
    stopping: Arc<Mutex<bool>>,
}

impl ScriptedServer {
    pub(crate) fn start(task: u32, state: ServerState) -> ScriptedServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let state = Arc::new(Mutex::new(state));
        let stopping = Arc::new(Mutex::new(false));
        let connection_state = state.clone();
        let stop = stopping.clone();
        let acceptor = std::thread::spawn(move || {
            let mut connections = Vec::new();
            for stream in listener.incoming() {
                if *stop.lock().unwrap() {
                    break;
                }
                let stream = stream.unwrap();
                let state = connection_state.clone();
                connections.push(std::thread::spawn(move || serve(task, stream, &state)));
            }
            for connection in connections {
                connection.join().unwrap();
            }
        });
        ScriptedServer { address, state, acceptor: Some(acceptor), stopping }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, ServerState> {
        self.state.lock().unwrap()
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        *self.stopping.lock().unwrap() = true;
        let _ = TcpStream::connect(&self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let ended = acceptor.join();
            assert!(ended.is_ok() || std::thread::panicking(), "a server has panicked");
        }
    }
}

/// Serves one connection until either end closes it.
fn serve(task: u32, mut stream: TcpStream, state: &Mutex<ServerState>) {
    let mut reader = FrameReader::new();
    reader.open();
    while let Ok(Some((header, message, body))) = receive(&mut reader, &stream) {
        let mut state = state.lock().unwrap();
        if let Some(kind) = state.crashes_at.remove(message.name()) {
            match kind {
                CrashKind::LosesAnswer => drop(state.answer(task, &header, &message, &body)),
                CrashKind::LosesState => {
                    state.requests.push(format!("crash at {}", message.name()));
                    state.catalogue = None;
                    state.ready = false;
                    state.epoch = RestoreEpoch(0);
                    state.step = GlobalStep(0);
                }
            }
            return;
        }
        let Some((message, body)) = state.answer(task, &header, &message, &body) else { continue };
        let request = header.request;
        let step = state.step;
        let restore_epoch = state.epoch;
        let envelope = Envelope { request, step, restore_epoch, ..Envelope::default() };
        let mut out = Vec::new();
        encode(&mut out, &envelope, &message, BodyStamp::plain(body.len() as u64));
        out.extend(body);
        if stream.write_all(&out).is_err() {
            return;
        }
    }
}

fn receive(
    reader: &mut FrameReader,
    mut stream: &TcpStream,
) -> io::Result<Option<(Header, Message, Vec<u8>)>> {
    let mut source = |slices: &mut [IoSliceMut<'_>]| stream.read_vectored(slices);
    match reader.poll(&mut source).map_err(io::Error::other)? {
        Poll::Frame(header, message) => {
            let mut body = vec![0; header.body_bytes as usize];
            if !body.is_empty() {
                let poll = reader.poll_body(&mut source, &mut body).map_err(io::Error::other)?;
                assert_eq!(poll, BodyPoll::Done);
            }
            Ok(Some((header, message, body)))
        }
        _ => Ok(None),
    }
}

impl ServerState {
    /// Executes a request. Returns its answer and the body.
    fn answer(
        &mut self,
        task: u32,
        header: &Header,
        message: &Message,
        body: &[u8],
    ) -> Option<(Message, Vec<u8>)> {
        let found = header.restore_epoch;
        let hello = matches!(message, Message::Hello(_));
        if !hello && found.0 != 0 && found != self.epoch {
            return Some((self.other_epoch(found), Vec::new()));
        }
        let answer = match message {
            Message::Hello(_) => self.welcome().into(),
            Message::Heartbeat(_) => message::HeartbeatAnswer {}.into(),
            Message::Declare(_) => {
                self.requests.push("declare".to_owned());
                self.catalogue.get_or_insert_with(|| Catalogue::decode(body).unwrap());
                let state = self.catalogue_state();
                let restore_epoch = self.epoch;
                message::Declared { state, restore_epoch, trained: self.step > GlobalStep(0) }
                    .into()
            }
            Message::FindCheckpoint(_) => {
                self.requests.push("find".to_owned());
                let named = self.checkpoint.as_ref().map_or(RestoreEpoch(0), |it| it.epoch);
                message::CheckpointFound { checkpoint: self.checkpoint.clone(), named }.into()
            }
            Message::PassedOverQuery(_) => {
                let damaged = message::PassedOver {
                    name: Text::clipped("ckpt-9-9"),
                    cause: Text::clipped("cannot trust ckpt-9-9/MANIFEST"),
                };
                let checkpoints = List::new(vec![damaged]).unwrap();
                message::PassedOverAre { checkpoints }.into()
            }
            Message::Initialize(asked) => self.begin("initialize", asked.epoch, GlobalStep(0)),
            Message::PrepareRestore(_) if self.refuses_checkpoint => {
                self.requests.push("refuse".to_owned());
                let detail = Detail::clipped("cannot trust c");
                message::Refused { refusal: Refusal::Storage { detail } }.into()
            }
            Message::PrepareRestore(asked) => {
                self.requests.push(format!("prepare {}", asked.checkpoint.name.as_str()));
                message::RestorePrepared {}.into()
            }
            Message::Restore(asked) => {
                let name = asked.checkpoint.name.as_str();
                let step = asked.checkpoint.step;
                self.begin(&format!("restore {name}"), asked.epoch, step)
            }
            Message::Reserve(_) => message::Reserved { push_slot: 1 }.into(),
            Message::OutcomeQuery(_) => message::OutcomeIs { state: PushState::Unknown {} }.into(),
            Message::PushPart(part) => {
                part.whole?;
                self.requests.push("assign".to_owned());
                let outcome = Outcome::Applied { version: 1, step: self.step, staleness: 0 };
                let next = None;
                let ended = None;
                message::PushAnswer { outcome, duplicate: false, next, ended, push_slot: 0 }.into()
            }
            Message::Pull(_) => {
                let layout = self.catalogue.as_ref().unwrap().layout(ShardId { task, shard: 0 });
                let pulled = message::Pulled { version: 1, gradients: 0, offset: 0, last: true };
                return Some((pulled.into(), vec![0; layout.bytes() as usize]));
            }
            Message::Save(_) => {
                self.user = body.to_vec();
                message::Saved { checkpoint: self.checkpoint.clone().unwrap() }.into()
            }
            other => panic!("{other:?}"),
        };
        Some((answer, Vec::new()))
    }

    fn begin(&mut self, request: &str, epoch: RestoreEpoch, step: GlobalStep) -> Message {
        self.requests.push(format!("{request} in {epoch}"));
        let Some(digest) = self.catalogue.as_ref().map(Catalogue::digest) else {
            return message::Refused { refusal: Refusal::NotInitialized {} }.into();
        };
        if epoch <= self.epoch {
            return self.other_epoch(epoch);
        }
        self.epoch = epoch;
        self.step = step;
        self.ready = true;
        message::Ready { digest }.into()
    }

    fn other_epoch(&self, found: RestoreEpoch) -> Message {
        let current = self.epoch;
        let step = self.step;
        message::Refused { refusal: Refusal::RestoreEpoch { found, current, step } }.into()
    }

    fn catalogue_state(&self) -> CatalogueState {
        match self.catalogue.as_ref().map(Catalogue::digest) {
            None => CatalogueState::Absent {},
            Some(digest) if self.ready => CatalogueState::Ready { digest },
            Some(digest) => CatalogueState::Declared { digest },
        }
    }

    fn welcome(&self) -> Welcome {
        Welcome {
            version: version::NEWEST,
            shards: 1,
            client_epoch: ClientEpoch(1),
            mode: ModeIs::Asynchronous { owner_first: false },
            lease_ms: 60_000,
            part_bytes_max: 1 << 20,
            body_crc: BodyCrc::Off {},
            non_finite: NonFinitePolicy::Reject {},
            encodings: Encodings::all(),
            catalogue: self.catalogue_state(),
            restore_epoch: self.epoch,
            restored_step: self.step,
            arena: 1,
            unix_address: Text::default(),
            identity: Identity::new().to_wire(),
            features: Default::default(),
        }
    }
}
