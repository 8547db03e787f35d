// Generates the messages from the folders that PROTOS and GOOGLEAPIS name.
fn main() -> std::io::Result<()> {
    let protos = std::env::var("PROTOS").expect("PROTOS names the folder of the protos");
    let googleapis = std::env::var("GOOGLEAPIS").expect("GOOGLEAPIS names the folder of google/rpc");
    println!("cargo:rerun-if-changed={protos}");
    prost_build::Config::new().compile_protos(
        &[
            format!("{protos}/headrace/inference/v1/inference.proto"),
            format!("{googleapis}/google/rpc/status.proto"),
            format!("{googleapis}/google/rpc/error_details.proto"),
        ],
        &[protos, googleapis],
    )
}
