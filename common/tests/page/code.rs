//! The lines of the code that the tables of the page are compared with. Names, types and order of
//! fields are read from the source text. Kinds, sizes and limits are the compiled ones.

use std::collections::BTreeSet;
use std::mem::size_of;

use pushpull_common::codec::Encodings;
use pushpull_common::ids::*;
use pushpull_common::protocol::wire::Wire;
use pushpull_common::protocol::{Features, Header, Message, header, limits};

const MESSAGE: &str = concat!(
    include_str!("../../src/protocol/message/administration.rs"),
    include_str!("../../src/protocol/message/clusters.rs"),
    include_str!("../../src/protocol/message/coordinators.rs"),
    include_str!("../../src/protocol/message/checkpoints.rs"),
    include_str!("../../src/protocol/message/pulls.rs"),
    include_str!("../../src/protocol/message/pushes.rs"),
    include_str!("../../src/protocol/message/rings.rs"),
    include_str!("../../src/protocol/message/services.rs"),
    include_str!("../../src/protocol/message/sessions.rs"),
    include_str!("../../src/protocol/message/sharing.rs"),
    include_str!("../../src/protocol/message/steps.rs"),
    include_str!("../../src/protocol/message/tokens.rs"),
    include_str!("../../src/protocol/message/variables.rs"),
    include_str!("../../src/protocol/message.rs"),
);
const OUTCOME: &str = include_str!("../../src/protocol/outcome.rs");
const REFUSAL: &str = include_str!("../../src/protocol/refusal.rs");
const LIMITS: &str = include_str!("../../src/protocol/limits.rs");

macro_rules! values {
    ($($name:ident),*) => { [$((stringify!($name), limits::$name as u64)),*] };
}

/// The limits with their names.
const VALUES: &[(&str, u64)] = &values!(
    PART_BYTES_MAX,
    CATALOGUE_BYTES_MAX,
    META_BYTES_MAX,
    HANDSHAKE_META_BYTES_MAX,
    SELECTION_MAX,
    WINDOW,
    EFFECT_WINDOW,
    COORDINATORS_MAX,
    COORDINATOR_NAME_BYTES_MAX,
    PARKED_PER_CONNECTION_MAX,
    TOKENS_PER_CLIENT_MAX,
    STEP_PUSHES_MAX,
    AUDITED_PUSHES_MAX,
    RESTORE_EPOCHS_AHEAD,
    JOB_BYTES_MAX,
    STATUS_TASKS_MAX,
    CHECKPOINT_NAME_BYTES_MAX,
    PASSED_OVER_MAX,
    DATA_NAME_BYTES_MAX,
    USER_BLOB_BYTES_MAX,
    NAME_BYTES_MAX,
    IDENTITY_NAME_BYTES_MAX,
    IDENTITY_VALUE_BYTES_MAX,
    IDENTITY_FIELDS_MAX,
    UNIX_ADDRESS_BYTES_MAX,
    SHARE_REQUESTS_MAX,
    BUFFER_SLOTS_MAX,
    PUSH_BUFFERS_MAX,
    PUSH_SHARED_RANGES_MAX,
    PUSH_SHARED_RANGES_FEW,
    PRINCIPAL_NAME_BYTES_MAX,
    ACCESS_TOKEN_NAME_BYTES_MAX,
    DETAIL_BYTES_MAX,
    FUNCTION_NAME_BYTES_MAX,
    VALUE_NAME_BYTES_MAX,
    CALL_VALUES_MAX,
    VALUE_RANK_MAX,
    CALL_DEVICE_BYTES_MAX,
    CALL_DEPTH_MAX,
    CALLS_ENDED_MAX,
    RELEASES_MAX,
    DESCRIPTION_BYTES_MAX,
    RING_SIZE_MAX,
    RANK_ID_BYTES_MAX,
    HOST_BYTES_MAX,
    TASK_ADDRESS_BYTES_MAX,
    TASK_ID_BYTES_MAX,
    GATHERED_TASKS_MAX,
    CLUSTER_BYTES_MAX,
    RANK_ADDRESS_BYTES_MAX,
    RANK_ADDRESSES_MAX,
    RING_MISSING_MAX,
    READ_BUFFER_BYTES
);

macro_rules! widths {
    ($($name:ident),*) => { [$((stringify!($name), size_of::<$name>())),*] };
}

/// Types that wrap an integer, and their sizes in bytes.
const WIDTHS: [(&str, usize); 15] = widths!(
    VariableId,
    PartitionId,
    RequestId,
    GlobalStep,
    TokenId,
    Sequence,
    ClientEpoch,
    RestoreEpoch,
    ConfigEpoch,
    Incarnation,
    CoordinatorId,
    CoordinatorEpoch,
    EffectNumber,
    Encodings,
    Features
);

/// The declaration `name { inner }`, without comments and attributes.
struct Declared {
    name: String,
    inner: String,
}

/// Returns the declarations of a source that use the macro `by`.
fn declared(source: &str, by: &str) -> Vec<Declared> {
    let opening = format!("{by} {{");
    let calls = source.split("\n").enumerate().filter(|(_, line)| *line == opening);
    let calls = calls.map(|(number, _)| {
        let inner = source.lines().skip(number + 1).take_while(|line| *line != "}");
        let code = inner.map(str::trim).filter(|line| !line.starts_with(['/', '#']));
        code.collect::<Vec<&str>>().join(" ")
    });
    calls.map(|call| braced(&call)).collect()
}

/// Splits `name { inner }`.
fn braced(text: &str) -> Declared {
    let (name, inner) = text.split_once('{').unwrap_or_else(|| panic!("{text:?} has no braces"));
    let inner = inner.trim().strip_suffix('}').unwrap_or_else(|| panic!("{text:?} has no end"));
    Declared { name: name.trim().to_owned(), inner: inner.trim().to_owned() }
}

/// Splits a text at its commas, except those within brackets.
fn split_at_commas(text: &str) -> Vec<String> {
    let mut parts = Vec::new();
    let mut part = String::new();
    let mut depth = 0;
    for character in text.chars() {
        match character {
            '<' | '(' | '[' | '{' => depth += 1,
            '>' | ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(std::mem::take(&mut part).trim().to_owned());
                continue;
            }
            _ => {}
        }
        part.push(character);
    }
    parts.push(part.trim().to_owned());
    parts.retain(|part| !part.is_empty());
    parts
}

/// Formats fields such as `token: TokenId, push_slot: u32,` as `token: u64, push_slot: u32`. A field
/// behind a feature has the feature's name before its own, in brackets.
fn fields(inner: &str) -> String {
    let mut groups = inner.split("} behind ").map(str::trim);
    let first = fields_of_group(groups.next().unwrap_or_default(), "");
    let added = groups.map(|group| {
        let Declared { name, inner } = braced(&format!("{group} }}"));
        fields_of_group(&inner, &format!("[{}] ", name.to_lowercase()))
    });
    let groups = std::iter::once(first).chain(added).filter(|group| !group.is_empty());
    groups.collect::<Vec<String>>().join(", ")
}

fn fields_of_group(inner: &str, feature: &str) -> String {
    let field = |field: String| {
        let (name, form) = field.split_once(':').unwrap_or_else(|| panic!("{field:?} has no type"));
        format!("{feature}{}: {}", name.trim(), form_of(form.trim()))
    };
    split_at_commas(inner).into_iter().map(field).collect::<Vec<String>>().join(", ")
}

/// Returns the page's name for a Rust type.
fn form_of(rust: &str) -> String {
    if let Some((_, width)) = WIDTHS.iter().find(|(name, _)| *name == rust) {
        return format!("u{}", 8 * width);
    }
    if let Some(inner) = rust.strip_prefix('(').and_then(|rust| rust.strip_suffix(')')) {
        let forms: Vec<String> = split_at_commas(inner).iter().map(|form| form_of(form)).collect();
        return format!("({})", forms.join(", "));
    }
    let generic = rust.strip_suffix('>').and_then(|rust| rust.split_once('<'));
    if let Some((outer, inner)) = generic {
        let inner = split_at_commas(inner);
        return match outer {
            "Box" => form_of(&inner[0]),
            "Option" => format!("option {}", form_of(&inner[0])),
            "Text" => format!("text({})", value_of(&inner[0])),
            "List" => format!("list({}) {}", value_of(&inner[1]), form_of(&inner[0])),
            _ => panic!("the page has no name for the type {rust}"),
        };
    }
    match rust {
        "[u8; 32]" => "digest".to_owned(),
        "u8" | "u16" | "u32" | "u64" | "f64" | "bool" => rust.to_owned(),
        "Detail" | "IdentityFields" | "RankAddresses" => form_of(&alias(rust)),
        _ if message_names().contains(rust) => rust.to_owned(),
        _ => snake(rust),
    }
}

/// Returns the type that a type alias names.
fn alias(name: &str) -> String {
    let source = MESSAGE.to_owned() + REFUSAL;
    let opening = format!("pub type {name} =");
    let behind = source.split_once(&opening).map(|(_, behind)| behind);
    let behind = behind.unwrap_or_else(|| panic!("{name} is not declared"));
    let form = behind.split(';').next().unwrap_or_default();
    form.split_whitespace().collect::<Vec<&str>>().join(" ")
}

/// Returns the value of a limit that a type names.
fn value_of(text: &str) -> u64 {
    let name = text.trim_matches(['{', '}', ' ']);
    let name = name.strip_prefix("limits::").unwrap_or(name);
    let found = VALUES.iter().find(|(limit, _)| *limit == name);
    found.unwrap_or_else(|| panic!("{text:?} is not a limit")).1
}

/// Converts `NotReady` to `not_ready`.
fn snake(name: &str) -> String {
    let mut snake = String::new();
    for character in name.chars() {
        if character.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(character.to_lowercase());
    }
    snake
}

/// Returns the kinds and names of all messages.
fn kinds() -> Vec<(u16, String)> {
    let table = MESSAGE.split_once("\nmessages! {\n").expect("the messages have a table").1;
    let rows = table.lines().take_while(|line| *line != "}");
    let kinds = rows.map(|row| {
        let (kind, rest) = row.split_once(" => ").unwrap_or_else(|| panic!("{row:?} has no kind"));
        let name = rest.split(',').next().unwrap_or_default();
        (kind.trim().parse().expect("a kind is a number"), name.to_owned())
    });
    kinds.collect()
}

fn message_names() -> BTreeSet<String> {
    kinds().into_iter().map(|(_, name)| name).collect()
}

pub(crate) fn messages() -> BTreeSet<String> {
    let kinds = kinds();
    let structs = declared(MESSAGE, "wire_struct!");
    assert!(kinds.iter().map(|(kind, _)| kind).eq(Message::KINDS), "some kinds were not read");
    let line = |(kind, name): &(u16, String)| {
        let fields_of = structs.iter().find(|it| it.name == *name);
        let fields_of = fields_of.unwrap_or_else(|| panic!("{name} is not declared"));
        let body = Message::body_limit(*kind).expect("the kind is unknown");
        format!("{kind} {name}({}), body of at most {body}", fields(&fields_of.inner))
    };
    kinds.iter().map(line).collect()
}

pub(crate) fn structs() -> BTreeSet<String> {
    let names = message_names();
    let all = MESSAGE.to_owned() + OUTCOME;
    let structs = declared(&all, "wire_struct!");
    let within = structs.into_iter().filter(|it| !names.contains(&it.name));
    let mut lines: BTreeSet<String> =
        within.map(|it| format!("{}({})", snake(&it.name), fields(&it.inner))).collect();
    // The one struct that another module declares by hand.
    let mut shard = Vec::new();
    ShardId { task: 0x0403_0201, shard: 0x0605 }.put(&mut shard);
    assert_eq!(shard, [1, 2, 3, 4, 5, 6], "a task has four bytes and a shard two");
    lines.insert("shard_id(task: u32, shard: u16)".to_owned());
    lines
}

/// Returns the variants of a sum with their tags, names and fields.
fn variants_of(inner: &str) -> Vec<(String, String, String)> {
    // `=>` would count as a closing bracket.
    let variants = split_at_commas(&inner.replace("=>", "=")).into_iter().map(|variant| {
        let Declared { name, inner } = braced(&variant);
        let (tag, name) = name.split_once('=').unwrap_or_else(|| panic!("{name:?} has no tag"));
        (tag.trim().to_owned(), name.trim().to_owned(), fields(&inner))
    });
    variants.collect()
}

pub(crate) fn variants() -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for sum in declared(&(MESSAGE.to_owned() + OUTCOME), "wire_enum!") {
        for (tag, name, fields) in variants_of(&sum.inner) {
            lines.insert(format!("{} {tag} {}({fields})", snake(&sum.name), snake(&name)));
        }
    }
    lines
}

pub(crate) fn refusals() -> BTreeSet<String> {
    let sums = declared(REFUSAL, "wire_enum!");
    let variants = sums.iter().flat_map(|sum| variants_of(&sum.inner));
    variants.map(|(tag, name, fields)| format!("{tag} {name}({fields})")).collect()
}

pub(crate) fn features() -> BTreeSet<String> {
    let named = Features::NAMED.iter();
    named.map(|(number, name)| format!("{number} {}", name.to_lowercase())).collect()
}

pub(crate) fn limits() -> BTreeSet<String> {
    let named = LIMITS.lines().filter_map(|line| line.strip_prefix("pub const ")?.split_once(':'));
    let named: BTreeSet<&str> = named.map(|(name, _)| name).collect();
    let known: BTreeSet<&str> = VALUES.iter().map(|(name, _)| *name).collect();
    assert_eq!(known, named, "the list of limits differs from the source");
    VALUES.iter().map(|(name, value)| format!("{name} = {value}")).collect()
}

pub(crate) fn header() -> BTreeSet<String> {
    let zero = Header {
        version: 0,
        kind: 0,
        meta_bytes: 0,
        flags: 0,
        body_bytes: 0,
        request: RequestId(0),
        restore_epoch: RestoreEpoch(0),
        config_epoch: ConfigEpoch(0),
        step: GlobalStep(0),
        sequence: Sequence(0),
        deadline_ms: 0,
        body_crc: 0,
        auth: 0,
        meta_crc: 0,
    };
    let each = [
        ("version", Header { version: u16::MAX, ..zero }),
        ("kind", Header { kind: u16::MAX, ..zero }),
        ("meta_bytes", Header { meta_bytes: u32::MAX, ..zero }),
        ("flags", Header { flags: u32::MAX, ..zero }),
        ("body_bytes", Header { body_bytes: u64::MAX, ..zero }),
        ("request", Header { request: RequestId(u64::MAX), ..zero }),
        ("restore_epoch", Header { restore_epoch: RestoreEpoch(u32::MAX), ..zero }),
        ("config_epoch", Header { config_epoch: ConfigEpoch(u32::MAX), ..zero }),
        ("step", Header { step: GlobalStep(u64::MAX), ..zero }),
        ("sequence", Header { sequence: Sequence(u64::MAX), ..zero }),
        ("deadline_ms", Header { deadline_ms: u32::MAX, ..zero }),
        ("body_crc", Header { body_crc: u32::MAX, ..zero }),
        ("auth", Header { auth: u64::MAX, ..zero }),
        ("meta_crc", Header { meta_crc: u32::MAX, ..zero }),
    ];
    let put = |header: &Header| {
        let mut bytes = Vec::new();
        header.put(&mut bytes);
        bytes
    };
    let crc = Header::BYTES - 4;
    let empty = put(&zero);
    assert_eq!(empty[..4], header::MAGIC.to_le_bytes());
    assert_eq!(empty[crc..], crc32c::crc32c(&empty[..crc]).to_le_bytes());
    let mut lines = BTreeSet::from(["0: magic, 4 bytes".to_owned()]);
    lines.insert(format!("{crc}: header_crc, 4 bytes"));
    let mut covered = 8;
    for (name, header) in each {
        let bytes = put(&header);
        let changed: Vec<usize> = (0..crc).filter(|&at| bytes[at] != empty[at]).collect();
        lines.insert(format!("{}: {name}, {} bytes", changed[0], changed.len()));
        covered += changed.len();
    }
    assert_eq!(covered, Header::BYTES, "a byte of the header belongs to no field");
    lines
}
